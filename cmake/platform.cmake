# Refuses what spccl does not run on, one sentence each. Included after project(); tests/check_platform.py runs it
# alone (cmake -P) with other values of the variables that it reads.
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
  message(FATAL_ERROR "spccl runs on Linux only; this is ${CMAKE_SYSTEM_NAME}.")
endif()
if(NOT CMAKE_SIZEOF_VOID_P EQUAL 8)
  message(FATAL_ERROR "spccl needs a 64-bit target; this compiler makes ${CMAKE_SIZEOF_VOID_P}-byte pointers.")
endif()
if(NOT CMAKE_C_BYTE_ORDER STREQUAL "LITTLE_ENDIAN")
  message(FATAL_ERROR "spccl needs a little-endian CPU, as the kernels use frames in the byte order of the wire; "
    "this target is ${CMAKE_C_BYTE_ORDER}.")
endif()
# The oldest versions that the tests have passed with.
if(CMAKE_C_COMPILER_ID STREQUAL "GNU" AND CMAKE_C_COMPILER_VERSION VERSION_LESS 11)
  message(FATAL_ERROR "spccl needs GCC 11 or newer; this is GCC ${CMAKE_C_COMPILER_VERSION}: name another one in CC.")
endif()
if(CMAKE_C_COMPILER_ID STREQUAL "Clang" AND CMAKE_C_COMPILER_VERSION VERSION_LESS 13)
  message(FATAL_ERROR "spccl needs Clang 13 or newer; this is Clang ${CMAKE_C_COMPILER_VERSION}: name another one in CC.")
endif()
if(NOT CMAKE_C_COMPILER_ID MATCHES "^(GNU|Clang)$")
  message(FATAL_ERROR "spccl is built with GCC or Clang; this is ${CMAKE_C_COMPILER_ID}: name another one in CC.")
endif()
