# What `cmake --install` puts into a system: lib/libspccl.so*, include/spccl*.h and .cuh, and what CMake and pkg-config need
# to find them (tests/c/installed.cmake uses all of it). The installed files may be moved to another prefix.
include(CMakePackageConfigHelpers)

# Before 1.0 a minor version may break programs, so the loader and find_package tell minor versions apart.
set_target_properties(spccl PROPERTIES VERSION ${PROJECT_VERSION}
  SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
install(TARGETS spccl EXPORT spcclTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES csrc/spccl.h csrc/spccl_channel.h csrc/spccl_device.cuh csrc/spccl_experimental.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/spccl)
install(EXPORT spcclTargets NAMESPACE spccl:: DESTINATION ${package_dir})
configure_package_config_file(cmake/spcclConfig.cmake.in ${PROJECT_BINARY_DIR}/spcclConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/spcclConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/spcclConfig.cmake ${PROJECT_BINARY_DIR}/spcclConfigVersion.cmake
  DESTINATION ${package_dir})

file(RELATIVE_PATH pc_to_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
configure_file(cmake/spccl.pc.in ${PROJECT_BINARY_DIR}/spccl.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/spccl.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
