"""Modules whose weights are sharded by `torch.distributed.fsdp.fully_shard`."""

from __future__ import annotations

import sys

from torch import nn


def reshard(module: nn.Module) -> None:
    """Shard the weights of all `fully_shard` modules again, as they are before a step.

    After a forward pass without a backward pass, the outermost modules keep whole copies of their weights. An optimiser
    updates only the sharded weights, so the next forward pass would use the old copies.
    """
    # If this part of PyTorch was not imported, no module is sharded.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(fsdp, "FSDPModule", None)
    for submodule in module.modules():
        if sharded is not None and isinstance(submodule, sharded):
            submodule.reshard()
