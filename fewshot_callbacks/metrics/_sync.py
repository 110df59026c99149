"""Gathers the states of metrics from all processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fewshot_callbacks.distributed.torch_distributed import cpu_group


def gather_tensors(tensor: Tensor, group: Any | None = None) -> list[Tensor]:
    """Gather the tensors of all processes, by rank, without empty ones: `dist_sync_fn` of `torchmetrics.Metric`.

    Unlike the function of torchmetrics, it accepts a process without a single batch, whose state has no shape and no
    dtype yet, and tensors on the CPU under a backend that supports only CUDA.
    """
    if group is None or group is torch.distributed.group.WORLD:
        group = cpu_group()
    everyone: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, tensor.detach().cpu(), group=group)
    return [held.to(tensor.device) for held in everyone if held.numel()] or [tensor]
