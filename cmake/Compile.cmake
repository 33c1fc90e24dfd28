# bagua_compile_options(TARGET): warnings, floating point and sanitizers of everything built here.

set(bagua_sanitizers "" "address,undefined" "thread")
if(NOT BAGUA_SANITIZE IN_LIST bagua_sanitizers)
  message(FATAL_ERROR "BAGUA_SANITIZE is '${BAGUA_SANITIZE}': "
    "use \"\", \"address,undefined\" or \"thread\"")
endif()

function(bagua_compile_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra $<$<BOOL:${BAGUA_WERROR}>:-Werror>)
  # gcc 12 takes `"text" + std::string()` for an overlapping copy (its bug 105651).
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${target} PRIVATE -Wno-restrict)
  endif()
  # A fused multiply-add rounds once instead of twice: ranks on different processors, and CPUs and
  # GPUs, would get different bits from the same codec.
  target_compile_options(${target} PRIVATE -ffp-contract=off)
  if(BAGUA_SANITIZE)
    target_compile_options(${target} PRIVATE
      -fsanitize=${BAGUA_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    # ThreadSanitizer does not model fences; here they order wake-ups, never the data itself.
    if(BAGUA_SANITIZE STREQUAL "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      target_compile_options(${target} PRIVATE -Wno-tsan)
    endif()
    target_link_options(${target} PUBLIC -fsanitize=${BAGUA_SANITIZE})
  endif()
endfunction()
