# SPDX-License-Identifier: Apache-2.0
"""By hand: MooncakeStoreConnector with a real master and store over loopback, under each scheduler. See docs/compatibility.md.

Run it in `tests/`. Not a test, because its library and what that needs of the system are not in CI's environment.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from real_vllm.models import FIRST_TEXT_ID, VOCABULARY_TOKENS, tiny_model
from real_vllm.runner import run_scenario
from real_vllm.scenario import PromptRequest, Scenario

MASTER = "127.0.0.1:51061"
STORE = f"""
from mooncake.store import MooncakeDistributedStore
import time
store = MooncakeDistributedStore()
print("setup", store.setup("127.0.0.1", "P2PHANDSHAKE", 512 << 20, 64 << 20, "tcp", "", "{MASTER}"), flush=True)
time.sleep(3600)
"""
CLIENT = {
    "mode": "standalone-store",
    "metadata_server": "P2PHANDSHAKE",
    "global_segment_size": 0,
    "local_buffer_size": "64MB",
    "protocol": "tcp",
    "device_name": "",
    "master_server_address": MASTER,
}
CONNECTOR = {
    "kv_role": "kv_both",
    "kv_connector": "MooncakeStoreConnector",
    "kv_connector_extra_config": {"load_async": True},
}
SHAPE = {
    "block_size": 32,
    "max_num_seqs": 4,
    "max_model_len": 704,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 96,
}
OURS = "tokenspeed_plugin.scheduler_fsm.TokenSpeedScheduler"
FLAT = {"additional_config": {"tokenspeed": {"kv_manager": "flat"}}}
ENGINES: list[tuple[str, str | None, dict[str, Any]]] = [
    ("--scheduler tokenspeed", OURS, {}),
    ("--kv-manager flat", None, FLAT),
    ("vLLM", None, {}),
]


def text(seed: int, num_tokens: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(FIRST_TEXT_ID, VOCABULARY_TOKENS) for _ in range(num_tokens))


@contextlib.contextmanager
def store() -> Iterator[None]:
    """A master and a process that lends it memory."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None, "install mooncake-transfer-engine-non-cuda first"
    folder = Path((spec.submodule_search_locations or [""])[0])
    host, _, port = MASTER.rpartition(":")
    log = subprocess.DEVNULL
    master = subprocess.Popen([folder / "mooncake_master", f"--rpc_port={port}"], stdout=log, stderr=log)
    _wait_for_port(host, int(port))
    lender = subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, stderr=log, text=True)
    assert lender.stdout is not None
    ready = next((line for line in lender.stdout if line.startswith("setup")), "nothing")
    try:
        assert ready.strip() == "setup 0", f"the store's memory: {ready}"
        yield
    finally:
        for process in (lender, master):
            process.terminate()
            process.wait()


def _wait_for_port(host: str, port: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        time.sleep(0.2)
    raise TimeoutError(f"nobody listens at {host}:{port} after {seconds:.0f} s")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, store():
        config = Path(folder) / "mooncake.json"
        config.write_text(json.dumps(CLIENT))
        os.environ |= {"MOONCAKE_CONFIG_PATH": str(config), "VLLM_HOST_IP": "127.0.0.1"}
        for seed, (name, scheduler_cls, more) in enumerate(ENGINES):
            requests = (PromptRequest(text(10 * seed, 600), 24), PromptRequest(text(10 * seed + 1, 300), 24))
            plain = run_scenario(Scenario(tiny_model("qwen3"), requests, None, SHAPE))
            arguments = {**SHAPE, "kv_transfer_config": CONNECTOR, **more}
            patches = ("leave_sockets_open",)
            connected = Scenario(tiny_model("qwen3"), requests, scheduler_cls, arguments, host_patches=patches)
            for turn in ("first", "second"):
                found = run_scenario(connected, 300.0)
                same = found.token_ids == plain.token_ids
                print(f"{name}, {turn} engine: {found.num_external_tokens} tokens from the store, tokens equal: {same}")


if __name__ == "__main__":
    main()
