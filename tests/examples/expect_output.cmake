# cmake -DPROGRAM=... -DEXPECTED=... -P expect_output.cmake: the program's output must be the file's text.
execute_process(COMMAND "${PROGRAM}" OUTPUT_VARIABLE actual COMMAND_ERROR_IS_FATAL ANY)
file(READ "${EXPECTED}" expected)
if(expected STREQUAL "")
  message(FATAL_ERROR "the README must show the output of its first program, and does not")
endif()
if(NOT actual STREQUAL expected)
  message(FATAL_ERROR "expected:\n${expected}\ngot:\n${actual}")
endif()
