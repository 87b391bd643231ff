# Installs the build, moves what was installed, and builds and runs a project that finds it there.
include("${CMAKE_CURRENT_LIST_DIR}/consumer.cmake")

file(REMOVE_RECURSE "${WORK_DIR}")
attn_run("${CMAKE_COMMAND}" --install "${ATTN_BUILD_DIR}" --config "${BUILD_TYPE}" --prefix "${WORK_DIR}/installed")
file(RENAME "${WORK_DIR}/installed" "${WORK_DIR}/moved")

attn_consumer_command(configure find_package
  "-DCMAKE_BUILD_TYPE=${BUILD_TYPE}" "-DCMAKE_PREFIX_PATH=${WORK_DIR}/moved")
attn_run(${configure})
attn_run("${CMAKE_COMMAND}" --build "${WORK_DIR}/build" --config "${BUILD_TYPE}")
find_program(program consumer PATHS "${WORK_DIR}/build" "${WORK_DIR}/build/${BUILD_TYPE}" NO_DEFAULT_PATH REQUIRED)
attn_run("${program}")

# A LibTorch of another minor version has another binary interface: refused when named, skipped when only found.
attn_fake_torch("${WORK_DIR}/other_torch" 2.99.0)
attn_expect(fails "LibTorch_ROOT must name .* got LibTorch 2.99.0 in .* attn needs LibTorch [0-9.]+ .this attn was built with it"
  ${configure} "-DLibTorch_ROOT=${WORK_DIR}/other_torch")
attn_expect(passes "skipping LibTorch 2.99.0 .* attn needs LibTorch [0-9.]+ .this attn was built with it"
  "${CMAKE_COMMAND}" -E env "CMAKE_PREFIX_PATH=${WORK_DIR}/other_torch" ${configure} -ULibTorch_ROOT)

# The LibTorch that attn was built with is gone, and there is no other.
file(GLOB_RECURSE config "${WORK_DIR}/moved/*/attn-config.cmake")
file(READ "${config}" text)
string(REGEX REPLACE "ATTN_TORCH_HINT \"[^\"]*\"" "ATTN_TORCH_HINT \"${WORK_DIR}/gone\"" text "${text}")
file(WRITE "${config}" "${text}")
attn_expect(fails "no LibTorch [0-9.]+ .this attn was built with it. found: pass -DLibTorch_ROOT"
  "${CMAKE_COMMAND}" -E env --unset=LibTorch_ROOT --unset=Torch_DIR --unset=CMAKE_PREFIX_PATH
  "XDG_CACHE_HOME=${WORK_DIR}/no_cache" "VIRTUAL_ENV=${CMAKE_CURRENT_LIST_DIR}/no_torch"
  ${configure} "-DCMAKE_PREFIX_PATH=${WORK_DIR}/moved")
