// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/fuzz/mutator.h"

#include <algorithm>

namespace tokenspeed::fuzz {

Input Mutator::random_input() {
    Input input(16 + below(496));
    std::ranges::generate(input, [this] { return random_byte(); });
    return input;
}

Input Mutator::mutate(const Input& parent, const Input& other) {
    Input input = parent;
    for (std::size_t num_changes = std::size_t{1} << below(4); num_changes > 0; --num_changes)
        change_once(input, other);
    input.resize(std::min(input.size(), kMaxInputBytes));
    return input;
}

void Mutator::change_once(Input& input, const Input& other) {
    if (input.empty()) input.push_back(0);
    const auto at = static_cast<std::ptrdiff_t>(below(input.size()));
    const auto left = static_cast<std::size_t>(input.end() - input.begin() - at);
    const auto length = static_cast<std::ptrdiff_t>(1 + below(std::min<std::size_t>(left, 32)));
    switch (below(6)) {
        case 0:
            input[static_cast<std::size_t>(at)] = random_byte();
            return;
        case 1:
            input[static_cast<std::size_t>(at)] ^= static_cast<std::uint8_t>(1U << below(8));
            return;
        case 2:
            input.erase(input.begin() + at, input.begin() + at + length);
            return;
        case 3: {
            Input fresh(static_cast<std::size_t>(length));
            std::ranges::generate(fresh, [this] { return random_byte(); });
            input.insert(input.begin() + at, fresh.begin(), fresh.end());
            return;
        }
        case 4: {
            const Input copy(input.begin() + at, input.begin() + at + length);
            input.insert(input.begin() + static_cast<std::ptrdiff_t>(below(input.size())), copy.begin(), copy.end());
            return;
        }
        default:
            // Goes on as another input does from here.
            input.resize(static_cast<std::size_t>(at));
            if (input.size() < other.size()) input.insert(input.end(), other.begin() + at, other.end());
    }
}

}  // namespace tokenspeed::fuzz
