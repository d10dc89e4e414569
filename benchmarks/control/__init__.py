# SPDX-License-Identifier: Apache-2.0
"""Parts of ``benchmarks.control_plane``: workloads, planes (systems under test), workers and bars.

Modules that the workers import (`tokens`, `steps`, `driver`, `workloads`, `planes`) need only the standard
library and numpy, so that a plane can run in an interpreter of its own.
"""
