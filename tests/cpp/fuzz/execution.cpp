// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/fuzz/execution.h"

#include <sanitizer/common_interface_defs.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "tests/cpp/fuzz/corpus.h"
#include "tests/cpp/scheduler_fsm/random_world.h"

namespace tokenspeed::fuzz {
namespace {

const Input* running_input = nullptr;
std::filesystem::path folder;

// The process is about to end: what it was doing is worth more than async-signal safety.
void note_death() {
    if (running_input == nullptr) return;
    const Input input = *running_input;
    running_input = nullptr;
    std::fprintf(stderr, "finding: the process ends; input in %s\n", write_input(folder, input).c_str());
}

void note_signal(int number) {
    note_death();
    std::_Exit(128 + number);
}

}  // namespace

Execution::Execution(std::filesystem::path findings) : findings_(std::move(findings)) {
    folder = findings_;
    __sanitizer_set_death_callback(note_death);
    for (const int number : {SIGABRT, SIGALRM}) std::signal(number, note_signal);
}

std::string Execution::run(const Input& input) {
    running_input = &input;
    alarm(kMaxSeconds);
    std::string failure;
    try {
        scheduler_fsm::testing::World world{scheduler_fsm::testing::Dice(input)};
        world.run();
    } catch (const std::exception& error) {
        failure = error.what();
    }
    alarm(0);
    running_input = nullptr;
    return failure;
}

Input Execution::shrink(Input input) {
    for (std::size_t length = input.size() / 2; length > 0; length /= 2) {
        for (std::size_t at = 0; at + length <= input.size();) {
            Input shorter = input;
            const auto begin = shorter.begin() + static_cast<std::ptrdiff_t>(at);
            shorter.erase(begin, begin + static_cast<std::ptrdiff_t>(length));
            if (run(shorter).empty()) {
                at += length;
            } else {
                input = std::move(shorter);
            }
        }
    }
    return input;
}

}  // namespace tokenspeed::fuzz
