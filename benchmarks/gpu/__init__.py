# SPDX-License-Identifier: Apache-2.0
"""Parts of ``benchmarks.gpu_throughput``: models, engine processes, measurements, server, bars."""
