# SPDX-License-Identifier: Apache-2.0
"""Keys and values straight from paged latents, by one CUDA kernel for Hopper."""
