# Finds LibTorch 2.11 or later and makes it one imported target, attn::torch.
#
# A LibTorch is a folder with include/ and lib/: the unpacked zip of libtorch, or the torch folder of a Python
# wheel. The first of these is taken:
#   1. LibTorch_ROOT: the CMake variable, then the environment variable (a wrong one is an error, not skipped);
#   2. Torch_DIR and CMAKE_PREFIX_PATH, as find_package(Torch) reads them;
#   3. the active Python environment's torch (found with find_spec, never imported);
#   4. the system's, in /usr/local or /usr;
#   5. ATTN_TORCH_HINT: where the installed attn was built (set by its package file);
#   6. what cmake/bootstrap.sh installed under the user's cache.
#
# TorchConfig.cmake is not used: for a CUDA build it stops without a CUDA toolkit, and with one it mixes the
# toolkit's libraries with the wheel's. attn has no .cu file, so it needs headers and shared libraries only.
#
# Sets ATTN_TORCH_ROOT, ATTN_TORCH_VERSION and ATTN_TORCH_CUDA (TRUE when the CUDA part is linked).
# Input: ATTN_CUDA = AUTO | ON | OFF; ATTN_TORCH_REQUIRED_VERSION = major.minor to insist on.
#
# `cmake -P AttnTorch.cmake` only says what it found: bootstrap.sh asks in this way, so the two always agree.

if(TARGET attn::torch)
  return()
endif()

set(ATTN_TORCH_LEAST_VERSION 2.11)
if(ATTN_TORCH_REQUIRED_VERSION)
  set(_attn_torch_wanted "LibTorch ${ATTN_TORCH_REQUIRED_VERSION} (this attn was built with it)")
else()
  set(_attn_torch_wanted "LibTorch ${ATTN_TORCH_LEAST_VERSION} or later")
endif()

# Looks into <root>: its LibTorch's <version> (empty when there is none) and its <fault> (empty when it fits).
function(_attn_torch_inspect root version fault)
  set(found "")
  foreach(header include/torch/headeronly/version.h include/torch/csrc/api/include/torch/version.h)
    if(NOT found AND EXISTS "${root}/${header}")
      file(STRINGS "${root}/${header}" lines REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
      list(JOIN lines " " text)
      if(text MATCHES "MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+)")
        set(found "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3}")
      endif()
    endif()
  endforeach()
  set(${version} "${found}" PARENT_SCOPE)

  if(found STREQUAL "")
    set(${fault} "no version.h in its include/torch" PARENT_SCOPE)
  elseif(found VERSION_LESS ATTN_TORCH_LEAST_VERSION OR
      (ATTN_TORCH_REQUIRED_VERSION AND NOT found MATCHES "^${ATTN_TORCH_REQUIRED_VERSION}\\."))
    set(${fault} "attn needs ${_attn_torch_wanted}" PARENT_SCOPE)
  elseif(NOT EXISTS "${root}/lib/libtorch_cpu.so")
    set(${fault} "lib/libtorch_cpu.so is not beside its include/" PARENT_SCOPE)
  else()
    set(${fault} "" PARENT_SCOPE)
  endif()
endfunction()

# Takes <root> when nothing is taken yet and it holds a fitting LibTorch; says why when one is skipped.
macro(_attn_torch_try root origin)
  if(NOT ATTN_TORCH_ROOT AND NOT "${root}" STREQUAL "")
    _attn_torch_inspect("${root}" _attn_version _attn_fault)
    if(_attn_fault STREQUAL "")
      file(REAL_PATH "${root}" ATTN_TORCH_ROOT)
      set(ATTN_TORCH_VERSION "${_attn_version}")
      set(_attn_torch_origin "${origin}")
    elseif(NOT _attn_version STREQUAL "")
      message(STATUS "attn: skipping LibTorch ${_attn_version} in ${root} (${origin}): ${_attn_fault}")
    endif()
  endif()
endmacro()

# A root that the user named: anything wrong with it ends the configuration.
macro(_attn_torch_insist root origin)
  if(NOT ATTN_TORCH_ROOT AND NOT "${root}" STREQUAL "")
    _attn_torch_inspect("${root}" _attn_version _attn_fault)
    if(NOT _attn_fault STREQUAL "")
      if(_attn_version STREQUAL "")
        set(_attn_version "none")
      endif()
      message(FATAL_ERROR "attn: ${origin} must name a LibTorch (a folder with include/ and lib/), "
        "got LibTorch ${_attn_version} in ${root}: ${_attn_fault}")
    endif()
    _attn_torch_try("${root}" "${origin}")
  endif()
endmacro()

# The root that a folder of TorchConfig.cmake belongs to: it is <root>/share/cmake/Torch, Debian's
# <root>/lib/<architecture>/cmake/Torch.
macro(_attn_torch_try_config_dir dir origin)
  if(EXISTS "${dir}/TorchConfig.cmake")
    foreach(_attn_up ../../.. ../../../..)
      get_filename_component(_attn_root "${dir}/${_attn_up}" ABSOLUTE)
      _attn_torch_try("${_attn_root}" "${origin}")
    endforeach()
  endif()
endmacro()

set(ATTN_TORCH_ROOT "")
_attn_torch_insist("${LibTorch_ROOT}" "the CMake variable LibTorch_ROOT")
_attn_torch_insist("$ENV{LibTorch_ROOT}" "the environment variable LibTorch_ROOT")

_attn_torch_try_config_dir("${Torch_DIR}" "Torch_DIR")
_attn_torch_try_config_dir("$ENV{Torch_DIR}" "Torch_DIR in the environment")
string(REPLACE ":" ";" _attn_env_prefixes "$ENV{CMAKE_PREFIX_PATH}")
foreach(_attn_prefix IN LISTS CMAKE_PREFIX_PATH _attn_env_prefixes)
  _attn_torch_try("${_attn_prefix}" "CMAKE_PREFIX_PATH")
  # torch.utils.cmake_prefix_path is <root>/share/cmake
  foreach(_attn_suffix Torch share/cmake/Torch lib/cmake/Torch)
    _attn_torch_try_config_dir("${_attn_prefix}/${_attn_suffix}" "CMAKE_PREFIX_PATH")
  endforeach()
endforeach()

if(NOT ATTN_TORCH_ROOT)
  # Nothing is cached: the next configuration may run in another environment.
  set(_attn_python_hints "")
  foreach(_attn_variable VIRTUAL_ENV CONDA_PREFIX)
    if(DEFINED ENV{${_attn_variable}})
      list(APPEND _attn_python_hints "$ENV{${_attn_variable}}/bin")
    endif()
  endforeach()
  unset(_attn_python)
  find_program(_attn_python NAMES python3 python HINTS ${_attn_python_hints} NO_CACHE)
  if(_attn_python)
    execute_process(
      COMMAND "${_attn_python}" -c
        "import importlib.util as u; s = u.find_spec('torch'); print(list(s.submodule_search_locations or [''])[0] if s else '')"
      WORKING_DIRECTORY "${CMAKE_CURRENT_LIST_DIR}"  # Python looks there first, and there is no torch/ in it
      OUTPUT_VARIABLE _attn_root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    _attn_torch_try("${_attn_root}" "the active Python environment")
  endif()
endif()

_attn_torch_try("/usr/local" "the system")
_attn_torch_try("/usr" "the system")

_attn_torch_try("${ATTN_TORCH_HINT}" "where attn was built")

if(NOT ATTN_TORCH_ROOT)
  set(_attn_cache "$ENV{XDG_CACHE_HOME}")
  if(_attn_cache STREQUAL "")
    set(_attn_cache "$ENV{HOME}/.cache")
  endif()
  # The file `complete` is written last: without it, bootstrap.sh was interrupted or is still at work.
  file(GLOB _attn_stamps "${_attn_cache}/attn/torch-*/complete")
  list(SORT _attn_stamps COMPARE NATURAL ORDER DESCENDING)
  foreach(_attn_stamp IN LISTS _attn_stamps)
    get_filename_component(_attn_venv "${_attn_stamp}" DIRECTORY)
    file(GLOB _attn_root "${_attn_venv}/lib/python3*/site-packages/torch")
    _attn_torch_try("${_attn_root}" "cmake/bootstrap.sh")
  endforeach()
endif()

if(NOT ATTN_TORCH_ROOT)
  set(_attn_message "attn: no ${_attn_torch_wanted} found: pass -DLibTorch_ROOT=<folder with include/ and lib/>")
  if(NOT ATTN_TORCH_REQUIRED_VERSION)
    string(APPEND _attn_message ", or run cmake/bootstrap.sh once")
  endif()
  if(DEFINED CMAKE_FIND_PACKAGE_NAME)
    set(${CMAKE_FIND_PACKAGE_NAME}_NOT_FOUND_MESSAGE "${_attn_message}")
    set(${CMAKE_FIND_PACKAGE_NAME}_FOUND FALSE)
    return()
  elseif(CMAKE_SCRIPT_MODE_FILE)
    message(STATUS "${_attn_message}")
    return()
  endif()
  message(FATAL_ERROR "${_attn_message}")
endif()

# The CUDA part counts as there when its own libraries are (the loader finds every one) and a driver is.
set(ATTN_TORCH_CUDA FALSE)
set(_attn_cuda_lib "${ATTN_TORCH_ROOT}/lib/libtorch_cuda.so")
if(NOT DEFINED ATTN_CUDA)
  set(ATTN_CUDA AUTO)
endif()
if(ATTN_CUDA STREQUAL "AUTO")
  if(EXISTS "${_attn_cuda_lib}" AND EXISTS "/proc/driver/nvidia/version")
    execute_process(COMMAND ldd "${_attn_cuda_lib}" OUTPUT_VARIABLE _attn_ldd ERROR_QUIET)
    if(NOT _attn_ldd MATCHES "not found")
      set(ATTN_TORCH_CUDA TRUE)
    endif()
  endif()
elseif(ATTN_CUDA)
  if(NOT EXISTS "${_attn_cuda_lib}")
    message(FATAL_ERROR "attn: ATTN_CUDA=ON needs a LibTorch with lib/libtorch_cuda.so, got ${ATTN_TORCH_ROOT}")
  endif()
  set(ATTN_TORCH_CUDA TRUE)
endif()

if(ATTN_TORCH_CUDA)
  set(_attn_flavour "CPU and CUDA")
else()
  set(_attn_flavour "CPU")
endif()
message(STATUS "attn: LibTorch ${ATTN_TORCH_VERSION} (${_attn_flavour}) in ${ATTN_TORCH_ROOT}, from ${_attn_torch_origin}")
if(CMAKE_SCRIPT_MODE_FILE)
  return()
endif()

add_library(attn::torch INTERFACE IMPORTED GLOBAL)
set_target_properties(attn::torch PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES
    "${ATTN_TORCH_ROOT}/include;${ATTN_TORCH_ROOT}/include/torch/csrc/api/include"
  INTERFACE_COMPILE_FEATURES cxx_std_20)
set(_attn_libs "${ATTN_TORCH_ROOT}/lib/libtorch_cpu.so" "${ATTN_TORCH_ROOT}/lib/libc10.so")
if(ATTN_TORCH_CUDA)
  # Nothing refers to the CUDA library by symbol: it registers itself when it is loaded, so the linker must keep it.
  list(APPEND _attn_libs "${ATTN_TORCH_ROOT}/lib/libc10_cuda.so")
  set_property(TARGET attn::torch PROPERTY INTERFACE_LINK_OPTIONS
    "LINKER:--push-state,--no-as-needed,${_attn_cuda_lib},--pop-state"
    "LINKER:-rpath,${ATTN_TORCH_ROOT}/lib")
endif()
set_property(TARGET attn::torch PROPERTY INTERFACE_LINK_LIBRARIES "${_attn_libs}")
