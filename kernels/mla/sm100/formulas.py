# SPDX-License-Identifier: Apache-2.0
"""The softmax, in steps, written once for the compiler's numbers and for NumPy's.

`m` is the mathematics to use: `number(x)`, `exp2`, `log2`, `maximum(a, b)` and `select(condition, a, b)`. All exponents are
base 2.
"""

from __future__ import annotations

import math
from typing import Any

LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)


def finite(m: Any, top: Any) -> Any:
    """A maximum to subtract: 0 for a row that has seen nothing, so that no difference of infinities arises."""
    return m.select(top == -math.inf, m.number(0.0), top)


def raised(m: Any, top: Any, fresh: Any) -> tuple[Any, Any]:
    """The larger of two maxima, and the factor of everything that was computed under the first."""
    following = m.maximum(top, fresh)
    return following, m.exp2(top - finite(m, following))


def probability(m: Any, score: Any, scale_log2: Any, top: Any, bias_log2: float) -> Any:
    """A score's probability before it is divided by its row's sum, times two to the bias."""
    return m.exp2(score * scale_log2 - (finite(m, top) - bias_log2))


def row_end(m: Any, top: Any, total: Any, scale: Any, bias_log2: float) -> tuple[Any, Any]:
    """What a row of the output is multiplied by, and its log-sum-exp; 0 and -inf where nothing was seen."""
    some = total > 0.0
    safe = m.select(some, total, m.number(1.0))
    factor = m.select(some, scale / safe, m.number(0.0))
    return factor, m.select(some, top + m.log2(safe) - bias_log2, m.number(-math.inf))


def merge_step(m: Any, top: Any, lse: Any) -> tuple[Any, Any, Any]:
    """Adds a part to a merge: the new maximum, the factor of what was added before, and the weight of the part."""
    following, keep = raised(m, top, lse)
    return following, keep, m.exp2(lse - finite(m, following))
