// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/fuzz/corpus.h"

#include <algorithm>
#include <fstream>
#include <iterator>

#include "tests/cpp/fuzz/edge_map.h"

namespace tokenspeed::fuzz {
namespace {

Input read_file(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<std::filesystem::path> files_of(const std::filesystem::path& folder) {
    std::vector<std::filesystem::path> paths;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
        if (entry.is_regular_file()) paths.push_back(entry.path());
    }
    std::ranges::sort(paths);
    return paths;
}

}  // namespace

bool Corpus::offer(const Input& input, const std::vector<std::uint32_t>& features) {
    const bool is_new = std::ranges::any_of(features, [this](auto feature) { return !features_.contains(feature); });
    if (!is_new) return false;
    std::vector<std::uint32_t> edges;
    for (const std::uint32_t feature : features) {
        features_.insert(feature);
        edges.push_back(EdgeMap::edge_of(feature));
    }
    edges_.insert(edges.begin(), edges.end());
    inputs_.push_back(input);
    edges_of_.push_back(std::move(edges));
    return true;
}

std::vector<std::size_t> Corpus::cover() const {
    std::vector<std::size_t> chosen;
    std::unordered_set<std::uint32_t> missing = edges_;
    while (!missing.empty()) {
        std::size_t best = 0;
        double best_gain = 0.0;
        for (std::size_t i = 0; i < inputs_.size(); ++i) {
            const auto num_new =
                std::ranges::count_if(edges_of_[i], [&](std::uint32_t edge) { return missing.contains(edge); });
            const double gain = static_cast<double>(num_new) / (64.0 + static_cast<double>(inputs_[i].size()));
            if (gain > best_gain) {
                best = i;
                best_gain = gain;
            }
        }
        for (const std::uint32_t edge : edges_of_[best]) missing.erase(edge);
        chosen.push_back(best);
    }
    return chosen;
}

std::vector<Input> Corpus::read(const std::filesystem::path& folder) {
    std::vector<Input> inputs;
    for (const auto& path : files_of(folder)) inputs.push_back(read_file(path));
    return inputs;
}

void Corpus::write_minimised(const std::filesystem::path& folder) const {
    for (const auto& path : files_of(folder)) std::filesystem::remove(path);
    for (const std::size_t index : cover()) write_input(folder, inputs_[index]);
}

std::filesystem::path write_input(const std::filesystem::path& folder, const Input& input) {
    std::uint64_t hash = 0xCBF29CE484222325ULL;  // FNV-1a
    for (const std::uint8_t byte : input) hash = (hash ^ byte) * 0x100000001B3ULL;
    constexpr std::string_view kDigits = "0123456789abcdef";
    std::string name(16, '0');
    for (char& digit : name) {
        digit = kDigits[hash >> 60U];
        hash <<= 4U;
    }
    std::filesystem::create_directories(folder);
    const auto path = folder / name;
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(input.data()), std::ssize(input));
    return path;
}

}  // namespace tokenspeed::fuzz
