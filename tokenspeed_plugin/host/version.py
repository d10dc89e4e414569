# SPDX-License-Identifier: Apache-2.0
"""Which vLLM is installed and which ones are supported."""

import re

SUPPORTED_FROM = (0, 32)
SUPPORTED_BELOW = (0, 34)
SUPPORTED = ">=0.32,<0.34"


def installed_version() -> str | None:
    """vLLM's version, None when there is no vLLM that can be imported."""
    try:
        import vllm
    except Exception:  # a broken vLLM must be reported, not raised through
        return None
    version = getattr(vllm, "__version__", None)
    return str(version) if version else None


def is_supported(version: str) -> bool:
    """Whether `version` lies in the supported range; what cannot be read as a version does not."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and SUPPORTED_FROM <= (int(match[1]), int(match[2])) < SUPPORTED_BELOW
