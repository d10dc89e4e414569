// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/encoder_pass.h"

#include <catch2/catch.hpp>

#include "fixture.h"

using namespace tokenspeed::scheduler_fsm;
using namespace tokenspeed::scheduler_fsm::testing;
using Rows = std::map<std::string, std::uint32_t>;
using Runs = std::vector<std::pair<std::string, std::uint32_t>>;

namespace {

struct Place {
    std::string identifier;
    std::uint32_t begin;
    std::uint32_t end;
};

/// A bench whose requests have encoder inputs.
struct EncoderBench : Bench {
    using Bench::Bench;

    void add_with(const std::string& label, std::uint32_t num_prompt, std::uint32_t max_tokens,
                  const std::vector<Place>& places) {
        RequestSpec spec = spec_of(label, num_prompt, max_tokens, next_++, 4);
        for (const Place& place : places) {
            spec.prompt.encoder_inputs.push_back(
                {place.identifier, {place.begin, place.end}, {{place.begin, place.end}}});
        }
        add(std::move(spec));
    }

    /// Rows of the next step; what it encodes and what goes is kept aside.
    Rows step() {
        const Rows rows = plan();
        runs.clear();
        for (const auto& [request, number] : last().encoder_runs) runs.emplace_back(request->label, number);
        evicted = last().evicted_encoder_outputs;
        return rows;
    }

    Runs runs;
    std::vector<std::string> evicted;

  private:
    TokenId next_ = 500;
};

Shape shape_of(EncoderLimits limits) {
    Shape shape;
    shape.num_blocks = 40;
    shape.budget = 16;
    shape.encoder = limits;
    return shape;
}

}  // namespace

TEST_CASE("a chunk stops before an input that the step's encoder budget cannot take") {
    EncoderBench bench(shape_of({6, 20}));
    bench.add_with("a", 14, 1, {{"x", 2, 6}, {"y", 8, 12}});
    CHECK(bench.step() == Rows{{"a", 8}});
    CHECK(bench.runs == Runs{{"a", 0}});
    bench.advance();
    CHECK(bench.step() == Rows{{"a", 6}});
    CHECK(bench.runs == Runs{{"a", 1}});
    CHECK(bench.advance() == std::vector<std::string>{"a"});
    CHECK(bench.evicted.empty());
}

TEST_CASE("one image is encoded once for all requests of a step, and again for nobody while it is cached") {
    EncoderBench bench(shape_of({6, 20}));
    bench.add_with("a", 6, 1, {{"x", 0, 6}});
    bench.add_with("b", 6, 1, {{"x", 0, 6}});
    CHECK(bench.step() == Rows{{"a", 6}, {"b", 6}});
    CHECK(bench.runs == Runs{{"a", 0}});
    bench.advance();
    bench.add_with("c", 8, 1, {{"x", 1, 7}});
    CHECK(bench.step() == Rows{{"c", 8}});
    CHECK(bench.runs.empty());
    CHECK(bench.scheduler.state().encoder_cache.num_held_embeds() == 6);
    bench.advance();
    CHECK(bench.scheduler.state().encoder_cache.num_held_embeds() == 0);
}

TEST_CASE("nothing that a step reads is evicted in its own plan") {
    EncoderBench bench(shape_of({20, 10}));
    bench.add_with("a", 6, 1, {{"x", 0, 6}});
    bench.add_with("b", 6, 1, {{"y", 0, 6}});
    CHECK(bench.step() == Rows{{"a", 6}});
    bench.advance();
    CHECK(bench.step() == Rows{{"b", 6}});
    CHECK(bench.evicted == std::vector<std::string>{"x"});
    bench.advance();
}

TEST_CASE("an input in the prefix cache needs no encoder run; one that it covers in part does") {
    EncoderBench bench(shape_of({6, 6}));
    RequestSpec first = spec_of("a", 12, 1, 900, 4);
    first.prompt.encoder_inputs = {{"x", {0, 4}, {{0, 4}}}, {"y", {6, 12}, {{6, 12}}}};
    RequestSpec second = first;
    second.label = "b";
    bench.add(std::move(first));
    while (!bench.step().empty()) bench.advance();
    // x gave way to y, and y to z.
    bench.add_with("other", 6, 1, {{"z", 0, 6}});
    bench.step();
    bench.advance();
    bench.add(std::move(second));
    CHECK(bench.step() == Rows{{"b", 4}});
    CHECK(bench.runs == Runs{{"b", 1}});
    bench.advance();
}

TEST_CASE("an input that must not be split is computed in one chunk") {
    EncoderBench bench(shape_of({20, 20, false}));
    bench.add_with("a", 22, 1, {{"x", 4, 14}, {"y", 15, 20}});
    CHECK(bench.step() == Rows{{"a", 15}});
    bench.advance();
    CHECK(bench.step() == Rows{{"a", 7}});
    bench.advance();
}

TEST_CASE("decodes leave the room that an input needs at once") {
    Shape shape = shape_of({20, 20, false});
    shape.budget = 8;
    shape.max_num_seqs = 8;
    EncoderBench bench(shape);
    for (const char* label : {"a", "b", "c", "d"}) bench.add(label, 1, 50);
    bench.step();
    bench.advance();
    bench.add_with("image", 9, 1, {{"x", 0, 6}});
    bool is_done = false;
    for (int step = 0; step < 6 && !is_done; ++step) {
        const Rows rows = bench.step();
        is_done = rows.contains("image") && rows.at("image") >= 6;
        bench.advance();
    }
    CHECK(is_done);
}

TEST_CASE("two prompts that must not be split move beside each other") {
    Shape shape = shape_of({20, 40, false});
    shape.budget = 12;
    shape.num_blocks = 200;
    EncoderBench bench(shape);
    bench.add_with("long", 400, 1, {{"x", 2, 12}, {"y", 20, 30}});
    bench.add_with("short", 12, 1, {{"z", 0, 10}});
    std::uint32_t num_steps = 0;
    while (bench.state("short") != "gone" && num_steps < 12) {
        ++num_steps;
        bench.step();
        bench.advance();
    }
    CHECK(num_steps < 12);
    CHECK(bench.scheduler.find(bench.handle("long"))->num_computed_tokens >= 20);
}

TEST_CASE("a request that waits for the cache retracts one that holds it and stands still") {
    // The older one needs room in the cache, the younger one blocks that the older one holds.
    Shape shape = shape_of({10, 10});
    shape.num_blocks = 12;
    shape.budget = 16;
    shape.prefix_caching = false;
    EncoderBench bench(shape);
    bench.add_with("old", 30, 30, {{"x", 0, 6}, {"y", 26, 30}});
    bench.add_with("young", 12, 1, {{"z", 0, 6}});
    for (int step = 0; step < 200 && bench.state("young") != "gone"; ++step) {
        bench.step();
        bench.advance();
    }
    CHECK(bench.state("young") == "gone");
}

TEST_CASE("retraction, the end and a reset let go of what a request holds") {
    Shape shape = shape_of({20, 20});
    shape.budget = 8;
    EncoderBench bench(shape);
    bench.add_with("a", 40, 1, {{"x", 10, 30}});
    const EncoderCache& cache = bench.scheduler.state().encoder_cache;
    for (int step = 0; step < 2; ++step) {
        bench.step();
        bench.advance();
    }
    CHECK(cache.num_held_embeds() == 20);
    bench.scheduler.retract_all();
    CHECK(cache.num_held_embeds() == 0);
    bench.step();
    CHECK(bench.runs.empty());
    bench.advance();
    CHECK(cache.num_held_embeds() == 20);
    bench.scheduler.reset_encoder_cache();
    CHECK(cache.num_held_embeds() == 0);
    bench.step();
    CHECK(bench.runs == Runs{{"a", 0}});
    CHECK(bench.scheduler.finish(bench.handle("a"), FinishReason::kAbort));
    CHECK(cache.num_held_embeds() == 0);
    bench.advance();
    bench.scheduler.check_integrity();
}

TEST_CASE("an input larger than the budget or the cache is refused on arrival, alone") {
    EncoderBench bench(shape_of({6, 20}));
    RequestSpec spec = spec_of("large", 20, 1, 1, 4);
    spec.prompt.encoder_inputs = {{"x", {0, 7}, {{0, 7}}}};
    const auto outcome = bench.scheduler.submit(std::move(spec));
    REQUIRE(std::holds_alternative<Refusal>(outcome));
    CHECK_THAT(std::get<Refusal>(outcome).message, Catch::Contains("7 embeddings") && Catch::Contains("6"));
    bench.add_with("small", 8, 1, {{"x", 0, 6}});
    CHECK(bench.step() == Rows{{"small", 8}});
    bench.advance();
}
