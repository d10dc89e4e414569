# SPDX-License-Identifier: Apache-2.0
"""Runs the append's Triton tier under Triton's interpreter against the reference; started by test_mla_append.py.

The interpreter cuts off where a GPU rounds to bf16 and e4m3; fp32 operands show the arithmetic.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from append_cases import E4M3, check, make_case

from tokenspeed_plugin.kernels.mla.triton_append import mla_append_triton


def main() -> None:
    """Run all cases."""
    cases = [
        *(
            make_case(3, heads=heads, page_tokens=page_tokens, interleaved=interleaved, dtype=torch.float32)
            for heads, page_tokens in ((16, 64), (20, 1), (1, 128))
            for interleaved in (True, False)
        ),
        make_case(2, dtype=torch.bfloat16),
        make_case(2, dtype=torch.bfloat16, cache_dtype=E4M3, interleaved=False, page_tokens=16),
        make_case(2, dtype=torch.float32, has_weight=False, page_tokens=32),
        make_case(0, dtype=torch.float32),
        replace(make_case(2, dtype=torch.float32), slots=None),
        replace(make_case(2, dtype=torch.float32), kv_cache=None, slots=None),
    ]
    for case in cases:
        check(case, mla_append_triton, rounds=case.q.dtype == torch.float32)
    print(f"{len(cases)} cases agree with the reference")


if __name__ == "__main__":
    main()
