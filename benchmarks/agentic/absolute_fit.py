# SPDX-License-Identifier: Apache-2.0
"""Coefficients by absolute errors, none of them negative: a few odd measurements do little."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ROUNDS, _CLOSE = 40, 1e-3  # of reweighting; relative errors below are all alike


def absolute_fit(columns: ArrayLike, measured: ArrayLike, weights: ArrayLike) -> NDArray[np.float64]:
    """Return the coefficients of `columns` with the least sum of absolute errors relative to `weights`; none is negative."""
    divisors = np.asarray(weights, dtype=float)
    features = np.asarray(columns, dtype=float) / divisors[:, None]
    wanted = np.asarray(measured, dtype=float) / divisors
    trust = np.ones(len(wanted))
    for _ in range(_ROUNDS):
        found = _least_squares(features * trust[:, None], wanted * trust)
        trust = 1 / np.sqrt(np.maximum(np.abs(features @ found - wanted), _CLOSE))
    return found


def _least_squares(features: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    scale = np.maximum(features.max(axis=0), 1e-12)
    active = list(range(features.shape[1]))
    found = np.zeros(features.shape[1])
    while active:
        solved = np.linalg.lstsq(features[:, active] / scale[active], wanted, rcond=None)[0]
        if (solved >= 0).all():
            found[active] = solved / scale[active]
            break
        del active[int(np.argmin(solved))]
    return found
