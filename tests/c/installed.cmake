# Installs a build of spccl and builds examples/c against it, outside of the source tree, as a user would, with
# find_package. The paths have spaces. installed_pkg_config.sh then does the same with pkg-config.
#   cmake -DBUILD=<build folder> -DEXAMPLE=<examples/c> -DWORK=<folder to use> -DCC=<compiler>
#         -DNVCC=<CUDA compiler or empty> -DVERSION=0.2.0 -P installed.cmake
cmake_minimum_required(VERSION 3.22)
set(prefix "${WORK}/an installed spccl")
set(example "${WORK}/an example")
file(REMOVE_RECURSE "${WORK}")
file(COPY "${EXAMPLE}/" DESTINATION "${example}")

function(must)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE text)
  string(JOIN " " command ${ARGV})
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${command}: ${status}\n${text}")
  endif()
  message(STATUS "${command}")
  set(output "${text}" PARENT_SCOPE)
endfunction()

must(${CMAKE_COMMAND} --install "${BUILD}" --prefix "${prefix}")

# The headers of channels: for C, and, with a CUDA compiler, the example's kernel.
file(COPY "${EXAMPLE}/../channels" DESTINATION "${WORK}")
file(WRITE "${WORK}/channel.c" "#include <spccl_channel.h>\n#include <spccl_experimental.h>\nint main(void)\n{\n    spccl_channels_destroy(0);\n    return 0;\n}\n")
file(GLOB_RECURSE header "${prefix}/*/spccl_channel.h")
get_filename_component(include_dir "${header}" DIRECTORY)
must("${CC}" -fsyntax-only -Wall -Werror "-I${include_dir}" "${WORK}/channel.c")
if(NVCC)
  must("${NVCC}" -cubin -arch=sm_90 -std=c++17 -Werror=all-warnings "-I${include_dir}" -o "${WORK}/ring.cubin"
    "${WORK}/channels/ring_kernel.cu")
else()
  message(STATUS "no nvcc: the example's kernel was not compiled")
endif()

# find_package
must(${CMAKE_COMMAND} -S "${example}" -B "${example}/build" "-DCMAKE_PREFIX_PATH=${prefix}" "-DCMAKE_C_COMPILER=${CC}")
must(${CMAKE_COMMAND} --build "${example}/build")
must("${example}/build/all_reduce")
string(REGEX MATCHALL "rank [01]: 0 wrong" right "${output}")
list(LENGTH right n_right)
if(NOT n_right EQUAL 2)
  message(FATAL_ERROR "all_reduce printed:\n${output}")
endif()

# The next minor version is another interface: find_package must not take this one for it.
string(REGEX MATCH "^([0-9]+)\\.([0-9]+)" minor "${VERSION}")
math(EXPR next "${CMAKE_MATCH_2} + 1")
file(WRITE "${WORK}/next/CMakeLists.txt" "cmake_minimum_required(VERSION 3.22)\nproject(next LANGUAGES NONE)\n"
  "find_package(spccl ${CMAKE_MATCH_1}.${next} REQUIRED)\n")
execute_process(COMMAND ${CMAKE_COMMAND} -S "${WORK}/next" -B "${WORK}/next/build" "-DCMAKE_PREFIX_PATH=${prefix}"
  RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE text)
if(status EQUAL 0 OR NOT text MATCHES "version: ${VERSION}")
  message(FATAL_ERROR "find_package(spccl ${CMAKE_MATCH_1}.${next}) with ${VERSION} installed: ${status}\n${text}")
endif()

# The name that programs ask the loader for.
file(GLOB_RECURSE library "${prefix}/*/libspccl.so.${minor}")
if(library STREQUAL "")
  message(FATAL_ERROR "no libspccl.so.${minor} in ${prefix}")
endif()
