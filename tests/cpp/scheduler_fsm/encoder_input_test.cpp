// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/encoder_input.h"

#include <catch2/catch.hpp>

using namespace tokenspeed::scheduler_fsm;

namespace {

EncoderInputSpec input(std::string identifier, std::uint32_t begin, std::uint32_t end) {
    return {std::move(identifier), {begin, end}, {{begin, end}}};
}

/// Why the inputs cannot be taken, with a prompt of 100 tokens, 20 embeddings a step, 30 in the cache, chunks of 40.
std::string refusal(const std::vector<EncoderInputSpec>& specs, bool split_inputs = true,
                    const EncoderCache& cache = EncoderCache(30)) {
    return EncoderInputs::refusal(specs, 100, {20, 30, split_inputs, 40}, cache).value_or("");
}

}  // namespace

TEST_CASE("an input that no step or no cache can take is refused with both numbers") {
    CHECK(refusal({input("a", 0, 20), input("b", 30, 50)}).empty());
    const std::string budget = refusal({input("a", 5, 26)});
    CHECK_THAT(budget, Catch::Contains("position 5") && Catch::Contains("21 embeddings") && Catch::Contains("is 20"));
    EncoderLimits small_cache{50, 30, true, 40};
    const auto cache = EncoderInputs::refusal({input("a", 0, 31)}, 100, small_cache, EncoderCache(30));
    REQUIRE(cache.has_value());
    CHECK_THAT(*cache, Catch::Contains("31 embeddings") && Catch::Contains("holds 30"));
}

TEST_CASE("only positions that take an embedding count") {
    EncoderInputSpec sparse{"a", {0, 60}, {{3, 10}, {50, 60}}};
    CHECK(sparse.num_embeds() == 17);
    CHECK(refusal({sparse}).empty());
    CHECK_THAT(refusal({sparse}, false), Catch::Contains("60 tokens") && Catch::Contains("has 40"));
}

TEST_CASE("an identifier stands for one content") {
    CHECK(refusal({input("a", 0, 5), input("a", 10, 15)}).empty());
    CHECK_THAT(refusal({input("a", 0, 5), input("a", 10, 16)}),
               Catch::Contains("'a'") && Catch::Contains("6 embeddings") && Catch::Contains("with 5"));
    EncoderCache cache(30);
    const EncoderName known = cache.name("a", 7);
    CHECK_THAT(refusal({input("a", 0, 5)}, true, cache), Catch::Contains("with 7"));
}

TEST_CASE("inputs that overlap must fit together") {
    const EncoderInputSpec video{"video", {0, 40}, {{0, 10}, {20, 28}}};
    const EncoderInputSpec audio{"audio", {5, 35}, {{10, 20}}};
    CHECK(refusal({audio, video}).empty());
    CHECK_THAT(refusal({audio, video}, false), Catch::Contains("28 embeddings") && Catch::Contains("is 20"));
    const EncoderInputSpec clash{"audio", {5, 35}, {{5, 15}}};
    CHECK_THAT(refusal({clash, video}), Catch::Contains("28 embeddings") && Catch::Contains("is 20"));
    const EncoderInputSpec large{"audio", {5, 35}, {{10, 20}, {28, 35}}};
    CHECK_THAT(refusal({large, video}), Catch::Contains("35 embeddings") && Catch::Contains("holds 30"));
}

TEST_CASE("places outside of the prompt and masks outside of their place are refused") {
    CHECK_THAT(refusal({input("a", 95, 101)}), Catch::Contains("95 to 101") && Catch::Contains("100 tokens"));
    CHECK_FALSE(refusal({input("a", 5, 5)}).empty());
    CHECK_FALSE(refusal({EncoderInputSpec{"a", {5, 10}, {{4, 6}}}}).empty());
    CHECK_FALSE(refusal({EncoderInputSpec{"a", {5, 10}, {{6, 8}, {7, 9}}}}).empty());
    CHECK_FALSE(refusal({EncoderInputSpec{"a", {5, 10}, {{6, 11}}}}).empty());
}

TEST_CASE("inputs are found by position, whatever order they came in") {
    EncoderCache cache(100);
    EncoderInputs inputs({input("c", 50, 60), input("a", 0, 10), {"b", {20, 40}, {{25, 30}, {32, 35}}}}, cache);
    REQUIRE(inputs.items().size() == 3);
    CHECK(inputs.items()[0].number == 1);
    CHECK(inputs.items()[2].number == 0);
    CHECK(inputs.first_after(9) == 0);
    CHECK(inputs.first_after(10) == 1);
    CHECK(inputs.first_after(60) == 3);
    const EncoderInput& sparse = inputs.items()[1];
    CHECK(sparse.next_embed(20) == 25);
    CHECK(sparse.next_embed(29) == 29);
    CHECK(sparse.next_embed(30) == 32);
    CHECK(sparse.next_embed(35) == kNoPosition);
}

TEST_CASE("references go when their whole place is computed") {
    EncoderCache cache(100);
    EncoderInputs inputs({input("a", 0, 10), input("b", 20, 40)}, cache);
    for (EncoderInput& item : inputs.items()) item.ref = cache.allocate(item.name);
    CHECK_FALSE(inputs.let_go(9));
    CHECK(cache.num_held_embeds() == 30);
    CHECK_FALSE(inputs.let_go(39));
    CHECK(cache.num_held_embeds() == 20);
    CHECK(inputs.let_go(40));
    CHECK(cache.num_held_embeds() == 0);
}
