# SPDX-License-Identifier: Apache-2.0
"""Linear layers of a few rows: decode steps of few requests, in which reading the weights is all that takes time."""
