// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/bindings/prompt.h"

#include <limits>
#include <utility>

#include "kv_flat/csrc/isolation_watch.h"
#include "scheduler_fsm/csrc/bindings/py_handle.h"

namespace tokenspeed::bindings {

std::vector<kv_flat::TokenId> read_tokens(const py::handle& sequence, const char* what) {
    const py::object fast = checked(PySequence_Fast(sequence.ptr(), "token ids must be a sequence of integers"));
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(fast.ptr());
    PyObject** items = PySequence_Fast_ITEMS(fast.ptr());
    std::vector<kv_flat::TokenId> tokens(static_cast<std::size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
        const long value = PyLong_AsLong(items[i]);
        if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
        if (value < 0 || value > std::numeric_limits<kv_flat::TokenId>::max()) {
            throw py::value_error(std::string(what) + " has token id " + std::to_string(value) + " at position " +
                                  std::to_string(i) + "; ids are from 0 to 2147483647");
        }
        tokens[static_cast<std::size_t>(i)] = static_cast<kv_flat::TokenId>(value);
    }
    return tokens;
}

scheduler_fsm::PreparedPrompt prepare_prompt(
    const py::list& tokens, std::uint32_t key_tokens, std::string salt, std::string adapter,
    const std::vector<std::tuple<std::uint32_t, std::uint32_t, std::string>>& content_spans,
    const std::vector<EncoderInputTuple>& encoder_inputs, std::uint32_t lookahead_tokens, bool marks_content) {
    scheduler_fsm::PreparedPrompt prompt;
    prompt.tokens = read_tokens(tokens, "the prompt");
    kv_flat::KeyContext context{std::move(salt), std::move(adapter), {}, lookahead_tokens};
    for (const auto& [begin, end, content_id] : content_spans) context.spans.push_back({begin, end, content_id});
    for (const auto& [identifier, begin, end, embeds] : encoder_inputs) {
        context.spans.push_back({begin, end, identifier});
        scheduler_fsm::EncoderInputSpec& input = prompt.encoder_inputs.emplace_back();
        input.identifier = identifier;
        input.place = {begin, end};
        for (const auto& [first, last] : embeds) input.embeds.push_back({first, last});
    }
    if (key_tokens > 0) {
        const py::gil_scoped_release unlocked;
        prompt.chain = kv_flat::KeyChain(key_tokens, std::move(context));
        prompt.chain.extend(prompt.tokens);
        if (marks_content) prompt.content_marks = kv_flat::content_marks(prompt.tokens, key_tokens);
    }
    return prompt;
}

}  // namespace tokenspeed::bindings
