# cmake --install: headers, library, and the package that find_package(attn) reads.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

string(REGEX MATCH "^[0-9]+\\.[0-9]+" ATTN_TORCH_MINOR_VERSION "${ATTN_TORCH_VERSION}")
set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/attn")

install(TARGETS attn EXPORT attn-targets
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
# Where LibTorch lies is found again by the consumer; the installed library remembers the one it was built with.
set_target_properties(attn PROPERTIES INSTALL_RPATH "$ORIGIN;${ATTN_TORCH_ROOT}/lib")
install(DIRECTORY include/attn DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.h")
install(EXPORT attn-targets NAMESPACE attn:: DESTINATION "${package_dir}")

configure_package_config_file(cmake/attn-config.cmake.in "${PROJECT_BINARY_DIR}/attn-config.cmake"
  INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/attn-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES
  "${PROJECT_BINARY_DIR}/attn-config.cmake"
  "${PROJECT_BINARY_DIR}/attn-config-version.cmake"
  cmake/AttnPcre2.cmake
  cmake/AttnTorch.cmake
  DESTINATION "${package_dir}")
