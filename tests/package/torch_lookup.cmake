# Which LibTorch the finder takes, and what it says of one that it does not take; with made-up LibTorch folders.
include("${CMAKE_CURRENT_LIST_DIR}/consumer.cmake")

if(EXISTS /usr/local/lib/libtorch_cpu.so OR EXISTS /usr/lib/libtorch_cpu.so)
  message("skipped: with a LibTorch in /usr or /usr/local there is always one to find")
  return()
endif()

file(REMOVE_RECURSE "${WORK_DIR}")
foreach(version 1.13.1 2.10.0 2.11.0 2.15.0)
  attn_fake_torch("${WORK_DIR}/${version}" ${version})
endforeach()

# An environment without any LibTorch: the active Python is a script that knows none.
file(WRITE "${WORK_DIR}/venv/bin/python3" "#!/bin/sh\necho \"\$ATTN_TEST_PYTHON_TORCH\"\n")
file(CHMOD "${WORK_DIR}/venv/bin/python3" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
set(nothing "${CMAKE_COMMAND}" -E env --unset=LibTorch_ROOT --unset=Torch_DIR --unset=CMAKE_PREFIX_PATH
  "VIRTUAL_ENV=${WORK_DIR}/venv" "XDG_CACHE_HOME=${WORK_DIR}/cache")

function(expect outcome pattern)
  attn_expect(${outcome} "${pattern}" ${nothing} ${ARGN} -P "${FINDER}")
endfunction()

expect(passes "no LibTorch 2.11 or later found: pass -DLibTorch_ROOT=.*, or run cmake/bootstrap.sh" "${CMAKE_COMMAND}")

# A named one must fit.
expect(fails "variable LibTorch_ROOT must name a LibTorch .* got LibTorch none in /nowhere"
  "${CMAKE_COMMAND}" -DLibTorch_ROOT=/nowhere)
expect(fails "environment variable LibTorch_ROOT must name a LibTorch .* got LibTorch none in /nowhere"
  LibTorch_ROOT=/nowhere "${CMAKE_COMMAND}")
expect(fails "got LibTorch 2.10.0 in .* attn needs LibTorch 2.11 or later"
  "${CMAKE_COMMAND}" "-DLibTorch_ROOT=${WORK_DIR}/2.10.0")
expect(passes "LibTorch 2.11.0 .CPU. in .*, from the CMake variable LibTorch_ROOT"
  "${CMAKE_COMMAND}" "-DLibTorch_ROOT=${WORK_DIR}/2.11.0")

# A found one that does not fit is skipped with a line.
expect(passes "skipping LibTorch 1.13.1 in .* attn needs LibTorch 2.11 or later.*LibTorch 2.15.0 .CPU. in .*, from CMAKE_PREFIX_PATH"
  "CMAKE_PREFIX_PATH=${WORK_DIR}/1.13.1:${WORK_DIR}/2.15.0" "${CMAKE_COMMAND}")
# Debian's: the libraries are in lib/<architecture>, and so is TorchConfig.cmake.
file(RENAME "${WORK_DIR}/1.13.1/lib" "${WORK_DIR}/x86_64-linux-gnu")
file(MAKE_DIRECTORY "${WORK_DIR}/1.13.1/lib")
file(RENAME "${WORK_DIR}/x86_64-linux-gnu" "${WORK_DIR}/1.13.1/lib/x86_64-linux-gnu")
set(config_dir "${WORK_DIR}/1.13.1/lib/x86_64-linux-gnu/cmake/Torch")
file(WRITE "${config_dir}/TorchConfig.cmake" "")
expect(passes "skipping LibTorch 1.13.1 in .* .Torch_DIR.: attn needs .* no LibTorch 2.11 or later found"
  "${CMAKE_COMMAND}" "-DTorch_DIR=${config_dir}")
expect(passes "skipping LibTorch 1.13.1 in .* .the active Python environment.: attn needs"
  "ATTN_TEST_PYTHON_TORCH=${WORK_DIR}/1.13.1" "${CMAKE_COMMAND}")
expect(passes "LibTorch 2.11.0 .CPU. in .*, from the active Python environment"
  "ATTN_TEST_PYTHON_TORCH=${WORK_DIR}/2.11.0" "${CMAKE_COMMAND}")

# bootstrap.sh's counts once it is complete.
file(COPY "${WORK_DIR}/2.15.0/" DESTINATION "${WORK_DIR}/cache/attn/torch-2.15.0/lib/python3.11/site-packages/torch")
expect(passes "no LibTorch 2.11 or later found" "${CMAKE_COMMAND}")
file(WRITE "${WORK_DIR}/cache/attn/torch-2.15.0/complete" "cpu\n")
expect(passes "LibTorch 2.15.0 .CPU. in .*, from cmake/bootstrap.sh" "${CMAKE_COMMAND}")
