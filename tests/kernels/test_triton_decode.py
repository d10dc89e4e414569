# SPDX-License-Identifier: Apache-2.0
"""The Triton tier without a GPU: right under the interpreter, and compiled for every platform that it claims."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed_plugin.kernels.mla import triton_decode

TARGETS = {
    "sm_90": (GPUTarget("cuda", 90, 32), "cubin"),
    "sm_100": (GPUTarget("cuda", 100, 32), "cubin"),
    "gfx950": (GPUTarget("hip", "gfx950", 64), "hsaco"),
}
POINTERS = {
    "q_nope": "*bf16",
    "q_rope": "*bf16",
    "kv": "*bf16",
    "table": "*i32",
    "seq_lens": "*i32",
    "query_starts": "*i32",
    "partial_out": "*fp32",
    "partial_lse": "*fp32",
    "out": "*bf16",
    "lse": "*fp32",
    "scale_log2": "fp32",
}
STRIDES = ("_token", "_head", "_page", "_stride")
SPLIT = {
    "num_heads": 16,
    "page_tokens": 64,
    "varlen": True,
    "latent_dims": 512,
    "rope_dims": 64,
    "block_rows": triton_decode.BLOCK_ROWS,
    "block_tokens": triton_decode.BLOCK_TOKENS,
}
MERGE = {
    "num_heads": 16,
    "varlen": True,
    "latent_dims": 512,
    "block_rows": triton_decode.BLOCK_ROWS,
    "block_splits": triton_decode.MERGE_SPLITS,
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("kernel", "constants"), [("decode_split", SPLIT), ("merge_splits", MERGE)])
def test_it_compiles(kernel: str, constants: dict[str, int], target: str) -> None:
    function = getattr(triton_decode, kernel)
    types = {
        name: "constexpr" if name in constants else POINTERS.get(name, "i64" if name.endswith(STRIDES) else "i32")
        for name in function.arg_names
    }
    gpu, binary = TARGETS[target]
    compiled = triton.compile(ASTSource(function, types, constants), target=gpu)
    assert len(compiled.asm[binary]) > 1000
    assert compiled.metadata.shared <= {"cuda": 232448, "hip": 163840}[gpu.backend]


def test_it_computes_the_definition() -> None:
    """In a process of its own: Triton interprets only when it is told so before its first import."""
    script = Path(__file__).with_name("interpreted_decode.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "6 cases agree with the reference"
