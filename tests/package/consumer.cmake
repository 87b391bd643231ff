# What the scripts beside this file share.

# attn_run(<command>...): shows the command's output, and ends the test when it fails.
function(attn_run)
  execute_process(COMMAND ${ARGN} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# attn_expect(<fails|passes> <regular expression> <command>...): the command must end so and print that text.
function(attn_expect outcome pattern)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " text "${output}")  # CMake breaks the lines of its messages
  set(actual passes)
  if(NOT result EQUAL 0)
    set(actual fails)
  endif()
  if(NOT actual STREQUAL outcome OR NOT text MATCHES "${pattern}")
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nmust end so: ${outcome}, with the text: ${pattern}\ngot: ${actual}\n${output}")
  endif()
  message(STATUS "as expected: ${pattern}")
endfunction()

# attn_fake_torch(<root> <major.minor.patch>): as much of a LibTorch as the finder looks at.
function(attn_fake_torch root version)
  string(REPLACE "." ";" numbers "${version}")
  list(POP_FRONT numbers major minor patch)
  file(WRITE "${root}/include/torch/csrc/api/include/torch/version.h"
    "#define TORCH_VERSION_MAJOR ${major}\n#define TORCH_VERSION_MINOR ${minor}\n#define TORCH_VERSION_PATCH ${patch}\n")
  file(WRITE "${root}/lib/libtorch_cpu.so" "")
endfunction()

# attn_consumer_command(<result> <project> [<cache argument>...]): the command that configures the project.
function(attn_consumer_command result project)
  set(${result} "${CMAKE_COMMAND}" -G "${GENERATOR}" -S "${CMAKE_CURRENT_LIST_DIR}/${project}" -B "${WORK_DIR}/build"
    "-DCMAKE_CXX_COMPILER=${COMPILER}" "-DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}" ${ARGN} PARENT_SCOPE)
endfunction()
