# Builds and runs a project that has attn as a subdirectory. attn is compiled anew for it: as a static library, which
# no other test covers, unoptimised and as few files at a time, so that it takes less than a minute.
include("${CMAKE_CURRENT_LIST_DIR}/consumer.cmake")

attn_consumer_command(configure add_subdirectory
  "-DATTN_SOURCE_DIR=${ATTN_SOURCE_DIR}" "-DLibTorch_ROOT=${TORCH_ROOT}" -DATTN_SHARED=OFF
  -DCMAKE_BUILD_TYPE= -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0)
attn_run(${configure})
attn_run("${CMAKE_COMMAND}" --build "${WORK_DIR}/build" --parallel 2)
find_program(program consumer PATHS "${WORK_DIR}/build" NO_DEFAULT_PATH REQUIRED)
attn_run("${program}")
