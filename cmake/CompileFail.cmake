# SPDX-License-Identifier: Apache-2.0
# Script behind tokenspeed_compile_fail: COMPILER, ROOT, SOURCE, EXPECTED and STATEMENT come from the command line.
# Statements share one source: that it compiles without them is checked once, by a test without STATEMENT.
set(command "${COMPILER}" -std=c++20 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -I "${ROOT}" "${SOURCE}")

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
