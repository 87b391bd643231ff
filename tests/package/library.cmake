# The library stays small, and gives its users no names of what it is built with.
file(SIZE "${LIBRARY}" size)
message(STATUS "${LIBRARY}: ${size} bytes")
if(size GREATER LARGEST_SIZE)
  message(FATAL_ERROR "${LIBRARY} must have at most ${LARGEST_SIZE} bytes, got ${size}")
endif()

execute_process(COMMAND "${NM}" --dynamic --defined-only --demangle "${LIBRARY}"
  OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]* (fmt|nlohmann|hwy|testing)::[^\n]*" foreign "${symbols}")
if(foreign)
  list(JOIN foreign "\n" foreign)
  message(FATAL_ERROR "${LIBRARY} must not export:\n${foreign}")
endif()
if(NOT symbols MATCHES " attn::")
  message(FATAL_ERROR "${LIBRARY} must export attn's functions, got:\n${symbols}")
endif()
