# SPDX-License-Identifier: Apache-2.0
"""Parts of ``python -m benchmarks.comm``: checks, times and peers of the fused all-reduce."""
