# SPDX-License-Identifier: Apache-2.0
# tokenspeed_options: what every target of ours is compiled with. Include paths start at the repository root,
# so a header is written as "kv_flat/csrc/block_pool.h".

add_library(tokenspeed_options INTERFACE)
target_include_directories(tokenspeed_options INTERFACE "${PROJECT_SOURCE_DIR}")
target_compile_features(tokenspeed_options INTERFACE cxx_std_20)
target_compile_options(tokenspeed_options INTERFACE -Wall -Wextra -Wpedantic -Wconversion)
if(TOKENSPEED_WERROR)
  target_compile_options(tokenspeed_options INTERFACE -Werror)
endif()
if(TOKENSPEED_SANITIZE)
  target_compile_options(tokenspeed_options INTERFACE
    "-fsanitize=${TOKENSPEED_SANITIZE}" -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  target_link_options(tokenspeed_options INTERFACE "-fsanitize=${TOKENSPEED_SANITIZE}")
endif()
