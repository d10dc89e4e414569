# SPDX-License-Identifier: Apache-2.0
"""MLA prefill of new tokens on a cached latent prefix, by keys and values that are unfolded once, a few heads at a time."""
