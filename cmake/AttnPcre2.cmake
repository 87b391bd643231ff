# Finds an installed PCRE2 for bytes -> attn::pcre2, or leaves the target undefined. A static attn's package reads it too.
if(NOT TARGET attn::pcre2)
  find_path(ATTN_PCRE2_INCLUDE_DIR pcre2.h)
  find_library(ATTN_PCRE2_LIBRARY pcre2-8)
  mark_as_advanced(ATTN_PCRE2_INCLUDE_DIR ATTN_PCRE2_LIBRARY)
  if(ATTN_PCRE2_INCLUDE_DIR AND ATTN_PCRE2_LIBRARY)
    add_library(attn::pcre2 UNKNOWN IMPORTED GLOBAL)
    set_target_properties(attn::pcre2 PROPERTIES
      IMPORTED_LOCATION "${ATTN_PCRE2_LIBRARY}"
      INTERFACE_INCLUDE_DIRECTORIES "${ATTN_PCRE2_INCLUDE_DIR}")
  endif()
endif()
