# SPDX-License-Identifier: Apache-2.0
"""MLA for NVIDIA Hopper, in CUDA C++ (`csrc`), built by nvcc on first use."""
