# SPDX-License-Identifier: Apache-2.0
"""Linear layers of few tokens by our kernel, in every process of an engine whose `--kernels` chose it.

vLLM asks one function for the product of each unquantized layer that it builds. The environment tells the workers to answer it.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from tokenspeed_plugin.host import patches

VARIABLE = "TOKENSPEED_FEW_ROWS"
_OPERATION = "tokenspeed_plugin.kernels.linear.operation"

Product = Callable[..., Any]
"""`product(layer, rows, weight, bias)`, as vLLM calls it."""


def install() -> None:
    """Have layers that are built from now on, in this process and in those it starts, take the kernel where it gains."""
    operation = importlib.import_module(_OPERATION)
    operation.take_products(on=True)

    def around(choose: Callable[..., Product]) -> Callable[..., Product]:
        def dispatch_unquantized_gemm(*args: Any, **kwargs: Any) -> Product:
            chosen = choose(*args, **kwargs)

            def product(layer: Any, rows: Any, weight: Any, bias: Any = None) -> Any:
                if operation.takes_layer(weight):
                    return operation.few_rows_linear(rows, weight, bias)
                return chosen(layer, rows, weight, bias)

            return product

        return dispatch_unquantized_gemm

    patches.wrap(patches.UNQUANTIZED_PRODUCT, around)
    os.environ[VARIABLE] = "1"


def install_inherited() -> None:
    """Do in this process what the process that started the engine did."""
    if os.environ.get(VARIABLE):
        install()


def remove() -> None:
    """Give vLLM's own products to layers that are built from now on; others keep theirs."""
    os.environ.pop(VARIABLE, None)
    if _OPERATION in sys.modules:  # else nothing was ever installed in this process
        importlib.import_module(_OPERATION).take_products(on=False)
        patches.unwrap(patches.UNQUANTIZED_PRODUCT)
