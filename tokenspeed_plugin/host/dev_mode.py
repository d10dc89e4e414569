# SPDX-License-Identifier: Apache-2.0
"""Whether vLLM's server offers its development routes."""


def is_dev_mode() -> bool:
    """As `VLLM_SERVER_DEV_MODE` says."""
    from vllm import envs

    return bool(envs.VLLM_SERVER_DEV_MODE)
