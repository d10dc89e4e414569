# SPDX-License-Identifier: Apache-2.0
"""The tensor core's sums of e4m3 products and the generator of their inputs, on the host."""

from __future__ import annotations

import numpy as np

from benchmarks.latent.cuda_generator import CudaGenerator, philox
from benchmarks.latent.e4m3_sums import IN_ORDER, UPPER_HALF_FIRST, e4m3_product, owners


def test_philox_gives_the_words_of_its_authors() -> None:
    assert [int(word) for word in philox((0, 0, 0, 0), 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    expected = [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert [int(word) for word in philox((ones, ones, ones, ones), 2**64 - 1)] == expected


def test_the_generator_draws_on() -> None:
    generator = CudaGenerator(seed=1, multiprocessors=2)
    values = generator.randn(10_000)
    assert abs(values.mean()) < 0.05
    assert abs(values.std() - 1) < 0.05
    assert generator.offset == 4
    assert sorted(generator.randperm(1000)) == list(range(1000))
    assert generator.offset == 4 + 4 + 1000


def test_sums_are_exact_up_to_13_fraction_bits() -> None:
    queries, keys = np.ones((1, 576)), np.zeros((1, 576))
    keys[0, :3] = 256, 2**-5, 2**-6
    assert e4m3_product(queries, keys, IN_ORDER)[0] == 256 + 2**-5
    keys[0, :3] = 128, 2**-5, 2**-6
    assert e4m3_product(queries, keys, IN_ORDER)[0] == 128 + 2**-5 + 2**-6


def test_the_order_of_dims_decides_what_is_cut() -> None:
    queries, keys = np.ones((1, 576)), np.zeros((1, 576))
    keys[0, 0], keys[0, 256:288] = 256, 2**-6
    assert e4m3_product(queries, keys, IN_ORDER)[0] == 256
    assert e4m3_product(queries, keys, UPPER_HALF_FIRST)[0] == 256 + 0.5


def test_warpgroups_take_tiles_by_turns() -> None:
    owner = owners(0)
    assert owner[[0, 63, 64, 127, 128, 199]].tolist() == [0, 0, 1, 1, 0, 1]
