# Every dependency but LibTorch: the installed package first, FetchContent otherwise.
include(FetchContent)

# attn_dependency(<package> <git tag> <repository> TARGET <target> [VERSION <least>]):
# makes <target> available, or stops with the name of the package that is missing.
function(attn_dependency package tag repository)
  cmake_parse_arguments(arg "" "TARGET;VERSION" "" ${ARGN})
  if(TARGET ${arg_TARGET})
    return()
  endif()
  find_package(${package} ${arg_VERSION} QUIET)
  if(NOT TARGET ${arg_TARGET})
    message(STATUS "attn: ${package} is not installed; fetching ${tag} from ${repository}")
    string(TOLOWER ${package} name)
    FetchContent_Declare(${name} GIT_REPOSITORY ${repository} GIT_TAG ${tag} GIT_SHALLOW ON SYSTEM)
    FetchContent_MakeAvailable(${name})
  endif()
  if(NOT TARGET ${arg_TARGET})
    message(FATAL_ERROR "attn: ${package} must provide the target ${arg_TARGET}, and does not")
  endif()
  # Found targets are private to the directory that asked; the project uses them everywhere.
  get_target_property(imported ${arg_TARGET} IMPORTED)
  if(imported)
    set_target_properties(${arg_TARGET} PROPERTIES IMPORTED_GLOBAL TRUE)
  endif()
endfunction()

# Header-only fmt: LibTorch's include folder holds another fmt, and with a linked libfmt the two meet at link time.
attn_dependency(fmt 11.2.0 https://github.com/fmtlib/fmt.git TARGET fmt::fmt-header-only)

# Vectors with run-time dispatch over instruction sets, for the kernels.
attn_dependency(hwy 1.2.0 https://github.com/google/highway.git TARGET hwy::hwy)

# JSON: headers of safetensors files, indices of shards, models' configurations.
attn_dependency(nlohmann_json v3.11.3 https://github.com/nlohmann/json.git TARGET nlohmann_json::nlohmann_json)

# Unicode regular expressions, for the tokenizer. Distributions leave out PCRE2's CMake package: found by its files.
include("${CMAKE_CURRENT_LIST_DIR}/AttnPcre2.cmake")
if(NOT TARGET attn::pcre2)
  message(STATUS "attn: pcre2 is not installed; fetching pcre2-10.42 from https://github.com/PCRE2Project/pcre2.git")
  set(PCRE2_BUILD_PCRE2GREP OFF CACHE BOOL "attn needs the library only" FORCE)
  set(PCRE2_BUILD_TESTS OFF CACHE BOOL "attn needs the library only" FORCE)
  set(PCRE2_STATIC_PIC ON CACHE BOOL "It becomes part of libattn.so" FORCE)
  set(PCRE2_SUPPORT_JIT ON CACHE BOOL "Splitting text is ten times as fast" FORCE)
  FetchContent_Declare(pcre2 GIT_REPOSITORY https://github.com/PCRE2Project/pcre2.git GIT_TAG pcre2-10.42 GIT_SHALLOW ON SYSTEM)
  FetchContent_MakeAvailable(pcre2)
  add_library(attn::pcre2 ALIAS pcre2-8-static)
endif()

if(ATTN_BUILD_APPS)
  attn_dependency(CLI11 v2.4.2 https://github.com/CLIUtils/CLI11.git TARGET CLI11::CLI11)
endif()
if(ATTN_BUILD_TESTS)
  set(INSTALL_GTEST OFF CACHE BOOL "A fetched googletest is not installed with attn" FORCE)
  attn_dependency(GTest v1.14.0 https://github.com/google/googletest.git TARGET GTest::gtest)
endif()
