# SPDX-License-Identifier: Apache-2.0
"""The flat KV manager under vLLM's own scheduler (`--kv-manager flat`)."""
