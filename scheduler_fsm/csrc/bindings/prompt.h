// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "scheduler_fsm/csrc/request.h"

namespace tokenspeed::bindings {

namespace py = pybind11;

/// Copies token ids out of a Python list. Throws TypeError or ValueError naming the position and the value.
[[nodiscard]] std::vector<kv_flat::TokenId> read_tokens(const py::handle& sequence, const char* what);

/// (identifier, begin, end, [(begin, end) of positions that take an embedding]), in prompt positions.
using EncoderInputTuple =
    std::tuple<std::string, std::uint32_t, std::uint32_t, std::vector<std::pair<std::uint32_t, std::uint32_t>>>;

/// Reads and hashes a prompt. Hashing runs without the GIL: it is called from EngineCore's input thread, beside the
/// step.
/// @param marks_content also mark what the tokens are, whatever the salt and the adapter
[[nodiscard]] scheduler_fsm::PreparedPrompt prepare_prompt(
    const py::list& tokens, std::uint32_t key_tokens, std::string salt, std::string adapter,
    const std::vector<std::tuple<std::uint32_t, std::uint32_t, std::string>>& content_spans,
    const std::vector<EncoderInputTuple>& encoder_inputs, std::uint32_t lookahead_tokens, bool marks_content);

}  // namespace tokenspeed::bindings
