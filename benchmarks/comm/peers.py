# SPDX-License-Identifier: Apache-2.0
"""What stock vLLM runs where ours runs: its custom all-reduce with its norm, and FlashInfer's fused kernel, which it prefers."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import distributed

from benchmarks.comm.checks import EPSILON
from tokenspeed_plugin.kernels.comm.all_reduce_add_norm import RowShape


class Stock:
    """vLLM's custom all-reduce and its fused norm, called as its engine calls them.

    Raises:
        RuntimeError: vLLM is not there, or its custom all-reduce does not work here; the message says why.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device) -> None:
        try:
            from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
        except Exception as error:
            raise RuntimeError(f"vLLM: {error}") from error
        self._reducer = CustomAllreduce(group, device)
        if self._reducer.disabled:
            raise RuntimeError("vLLM switched its custom all-reduce off here; its log says why")

    def capture(self) -> AbstractContextManager[object]:
        """What has to surround a capture."""
        context: AbstractContextManager[object] = self._reducer.capture()
        return context

    def __call__(self, branch: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> object:
        """One call; the residual is overwritten."""
        reduced = self._reducer.custom_all_reduce(branch)
        torch.ops._C.fused_add_rms_norm(reduced, residual, weight, EPSILON)
        return reduced


class FlashInferFused:
    """FlashInfer's one-launch all-reduce + add + norm without multicast, with the arguments that vLLM's fusion pass gives it.

    Raises:
        RuntimeError: FlashInfer is not there or cannot set up its memory; the message says why.
    """

    def __init__(self, group: distributed.ProcessGroup, shape: RowShape, *, one_shot: bool = True) -> None:
        """`one_shot`: each rank sends whole terms; else the ranks sum a part each and send that back."""
        self._one_shot = one_shot
        try:
            from flashinfer import comm
            from flashinfer.comm.mnnvl import TorchDistBackend
        except Exception as error:
            raise RuntimeError(f"FlashInfer: {error}") from error
        self._comm = comm
        self._workspace = comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=distributed.get_world_size(group),
            rank=distributed.get_rank(group),
            max_token_num=shape.max_rows,
            hidden_dim=shape.hidden,
            dtype=shape.dtype,
            comm_backend=TorchDistBackend(group=group),
            group=group,
        )

    def __call__(self, branch: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> object:
        """One call; the norm goes to `branch`, the sum to `residual`, as in vLLM."""
        return self._comm.allreduce_fusion(
            input=branch,
            workspace=self._workspace,
            pattern=self._comm.AllReduceFusionPattern.kARResidualRMSNorm,
            launch_with_pdl=True,
            trigger_completion_at_end=True,
            residual_out=residual,
            norm_out=branch,
            residual_in=residual,
            rms_gamma=weight,
            rms_eps=EPSILON,
            layout_code=self._comm.QuantizationSFLayout.SWIZZLED_128x4,
            use_oneshot=self._one_shot,
            fp32_acc=True,
        )

    def close(self) -> None:
        """Give the peers' memory back; all ranks together."""
        self._workspace.destroy()
