# SPDX-License-Identifier: Apache-2.0
"""Parts of `benchmarks.mla`: cells, timing, and the implementations held side by side."""
