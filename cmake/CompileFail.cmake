# SPDX-License-Identifier: Apache-2.0
# Script behind tokenspeed_compile_fail: COMPILER, ROOT, SOURCE, EXPECTED and STATEMENT come from the command line, and PRECOMPILED,
# a folder of precompiled headers. With HEADER in place of SOURCE it puts that header there.
# Statements share one source: that it compiles without them is checked once, by a test without STATEMENT.
set(compile "${COMPILER}" -std=c++20 -Wall -Wextra -Wpedantic -Werror)
if(HEADER)
  execute_process(COMMAND ${compile} -I "${ROOT}" -x c++-header "${ROOT}/${HEADER}" -o "${PRECOMPILED}/${HEADER}.gch"
    COMMAND_ERROR_IS_FATAL ANY)
  return()
endif()
set(command ${compile} -fsyntax-only -I "${PRECOMPILED}" -I "${ROOT}" "${SOURCE}")

if(NOT STATEMENT)
  execute_process(COMMAND ${command} RESULT_VARIABLE legal_result ERROR_VARIABLE legal_errors)
  if(NOT legal_result EQUAL 0)
    message(FATAL_ERROR "${SOURCE} does not even compile without TOKENSPEED_ILLEGAL:\n${legal_errors}")
  endif()
  if(NOT EXPECTED)
    return()
  endif()
endif()

execute_process(COMMAND ${command} -DTOKENSPEED_ILLEGAL "-DTOKENSPEED_STATEMENT=${STATEMENT}" RESULT_VARIABLE illegal_result ERROR_VARIABLE illegal_errors)
if(illegal_result EQUAL 0)
  message(FATAL_ERROR "${SOURCE} compiles with TOKENSPEED_ILLEGAL; expected an error that matches: ${EXPECTED}")
endif()
if(NOT illegal_errors MATCHES "${EXPECTED}")
  message(FATAL_ERROR "${SOURCE} fails for another reason than ${EXPECTED}:\n${illegal_errors}")
endif()
