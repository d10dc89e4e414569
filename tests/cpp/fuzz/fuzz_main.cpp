// SPDX-License-Identifier: Apache-2.0
// Coverage-guided fuzzing of the scheduler under random event streams, for compilers without libFuzzer.
//
//   scheduler_fuzz CORPUS [--executions N] [--seconds N] [--seed N] [--findings FOLDER] [--save]
//
// Replays the corpus, then mutates it until N executions or seconds are used up. --save writes the minimised corpus
// back. Exit code 1: something is wrong, and the shrunk input lies in FOLDER; `scheduler_fuzz FOLDER --executions 0`
// repeats it.
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string_view>

#include "tests/cpp/fuzz/corpus.h"
#include "tests/cpp/fuzz/edge_map.h"
#include "tests/cpp/fuzz/execution.h"
#include "tests/cpp/fuzz/mutator.h"

namespace tokenspeed::fuzz {
namespace {

struct Options {
    std::filesystem::path corpus;
    std::filesystem::path findings = "fuzz-findings";
    std::uint64_t executions = ~std::uint64_t{0};
    std::uint64_t seconds = 30;
    std::uint64_t seed = 1;
    bool save = false;
};

std::uint64_t number_of(std::string_view name, std::string_view text) {
    std::uint64_t value = 0;
    const auto end = text.data() + text.size();
    if (std::from_chars(text.data(), end, value).ptr != end || text.empty()) {
        throw std::invalid_argument(std::string(name) + " " + std::string(text) + ": a number is needed");
    }
    return value;
}

Options parse(const std::vector<std::string_view>& words) {
    Options options;
    for (std::size_t i = 0; i < words.size(); ++i) {
        const std::string_view word = words[i];
        if (word == "--save") {
            options.save = true;
            continue;
        }
        if (!word.starts_with("--")) {
            options.corpus = word;
            continue;
        }
        if (i + 1 == words.size()) throw std::invalid_argument(std::string(word) + " needs a value");
        const std::string_view value = words[++i];
        if (word == "--executions") {
            options.executions = number_of(word, value);
        } else if (word == "--seconds") {
            options.seconds = number_of(word, value);
        } else if (word == "--seed") {
            options.seed = number_of(word, value);
        } else if (word == "--findings") {
            options.findings = value;
        } else {
            throw std::invalid_argument(std::string(word) + " is not an option");
        }
    }
    if (options.corpus.empty()) throw std::invalid_argument("name a corpus folder");
    return options;
}

class Campaign {
  public:
    explicit Campaign(const Options& options)
        : options_(options),
          execution_(options.findings),
          mutator_(static_cast<std::uint32_t>(options.seed)),
          start_(std::chrono::steady_clock::now()) {}

    int run() {
        for (const Input& input : Corpus::read(options_.corpus)) {
            if (!try_input(input)) return 1;
        }
        std::printf("corpus: %zu inputs, %zu edges\n", num_executions_, corpus_.num_edges());
        const std::uint64_t num_replayed = num_executions_;
        while (num_executions_ - num_replayed < options_.executions && seconds() < options_.seconds) {
            if (!try_input(next_input())) return 1;
            if (num_executions_ % 10'000 == 0) report();
        }
        report();
        if (options_.save) corpus_.write_minimised(options_.corpus);
        return 0;
    }

  private:
    Input next_input() {
        const auto& inputs = corpus_.inputs();
        if (inputs.size() < 8 || mutator_.below(64) == 0) return mutator_.random_input();
        return mutator_.mutate(inputs[mutator_.below(inputs.size())], inputs[mutator_.below(inputs.size())]);
    }
    bool try_input(const Input& input) {
        EdgeMap::reset();
        ++num_executions_;
        const std::string failure = execution_.run(input);
        if (failure.empty()) {
            corpus_.offer(input, EdgeMap::features());
            return true;
        }
        const auto path = write_input(options_.findings, execution_.shrink(input));
        std::printf("finding after %zu executions: %s; input in %s\n", num_executions_, failure.c_str(), path.c_str());
        return false;
    }
    [[nodiscard]] std::uint64_t seconds() const {
        const auto elapsed = std::chrono::steady_clock::now() - start_;
        return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(elapsed).count());
    }
    void report() const {
        std::printf("%zu executions in %llu s: %zu edges, %zu features, %zu inputs, no finding\n", num_executions_,
                    static_cast<unsigned long long>(seconds()), corpus_.num_edges(), corpus_.num_features(),
                    corpus_.inputs().size());
        std::fflush(stdout);
    }

    Options options_;
    Execution execution_;
    Mutator mutator_;
    Corpus corpus_;
    std::chrono::steady_clock::time_point start_;
    std::size_t num_executions_ = 0;
};

}  // namespace
}  // namespace tokenspeed::fuzz

int main(int argc, char** argv) {
    using namespace tokenspeed::fuzz;
    try {
        return Campaign(parse({argv + 1, argv + argc})).run();
    } catch (const std::exception& error) {
        std::fprintf(stderr, "scheduler_fuzz: %s\n", error.what());
        return 2;
    }
}
