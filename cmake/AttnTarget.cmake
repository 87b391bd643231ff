# The only place with compiler flags: warnings, visibility, sanitizers, precompiled headers, ccache.

if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  endif()
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

  # ccache keeps g++'s precompiled headers only with these sloppiness settings.
  find_program(ATTN_CCACHE ccache)
  mark_as_advanced(ATTN_CCACHE)
  if(ATTN_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      "${ATTN_CCACHE}")
  endif()
endif()

# attn_target_defaults(<target>): what every target of the project is compiled with.
function(attn_target_defaults target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  get_target_property(type ${target} TYPE)
  set(position_independent ON)
  if(type STREQUAL "EXECUTABLE")
    set(position_independent OFF)  # the compiler's own default, as in attn_pch below
    # A unity build is for the library: programs' files keep their own names to themselves.
    set_target_properties(${target} PROPERTIES UNITY_BUILD OFF)
  endif()
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ${position_independent})
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow)
  if(ATTN_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(ATTN_SANITIZE)
    set(flags -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
    if(ATTN_SANITIZE STREQUAL "thread")
      set(flags -fsanitize=thread -fno-omit-frame-pointer)
    endif()
    target_compile_options(${target} PRIVATE ${flags})
    target_link_options(${target} PRIVATE ${flags})
  endif()
  if(ATTN_FUZZ AND NOT target STREQUAL "attn_kernels")  # the kernels read no files
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
    target_link_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
  endif()
endfunction()

# attn_target_openmp(<target>): at::parallel_for is a header template that runs serially, without a word, where it is
# compiled without OpenMP. By flags, not by OpenMP::OpenMP_CXX: that names the system's libgomp by path, and the process
# is to share the one beside LibTorch.
find_package(OpenMP QUIET COMPONENTS CXX)
if(NOT OpenMP_CXX_FOUND)
  message(STATUS "attn: ${CMAKE_CXX_COMPILER_ID} finds no OpenMP; the fused kernels will run on one thread")
endif()
function(attn_target_openmp target)
  if(NOT OpenMP_CXX_FOUND)
    return()
  endif()
  separate_arguments(flags UNIX_COMMAND "${OpenMP_CXX_FLAGS}")
  target_compile_options(${target} PRIVATE ${flags})
  target_link_options(${target} PRIVATE ${flags})
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "STATIC_LIBRARY")
    target_link_options(${target} INTERFACE ${flags})
  endif()
endfunction()

# attn_target_pch(<executable>): LibTorch's umbrella header, precompiled once and shared by all who ask for it.
# It pays from four files on: 40 s once (g++ 12), then 9 s instead of 21 s a file.
function(attn_target_pch target)
  if(NOT ATTN_PCH)
    return()
  endif()
  if(NOT TARGET attn_pch)
    file(GENERATE OUTPUT "${PROJECT_BINARY_DIR}/attn_pch.cpp" CONTENT "// holds the precompiled header\n")
    add_library(attn_pch OBJECT "${PROJECT_BINARY_DIR}/attn_pch.cpp")
    attn_target_defaults(attn_pch)
    target_link_libraries(attn_pch PRIVATE attn::torch)
    target_precompile_headers(attn_pch PRIVATE <torch/torch.h>)
    # Compilers refuse a header that was precompiled with -fPIC when they compile for an executable.
    set_target_properties(attn_pch PROPERTIES EXCLUDE_FROM_ALL ON POSITION_INDEPENDENT_CODE OFF)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      target_compile_options(attn_pch PRIVATE -fpch-preprocess)
    endif()
  endif()
  target_precompile_headers(${target} REUSE_FROM attn_pch)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -fpch-preprocess)
  endif()
endfunction()
