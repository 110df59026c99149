"""Modules whose weights are divided among processes (`torch.distributed.fsdp.fully_shard`)."""

from __future__ import annotations

import sys

from torch import nn


def reshard(module: nn.Module) -> None:
    """Divide the weights of all modules of `fully_shard` again, as they are before a step.

    After a forward pass without a backward pass, the outermost of them keep whole copies of their weights. An optimiser
    updates only the divided weights, and the next forward pass would use the old copies.
    """
    # Nobody has sharded a module with a part of PyTorch that was not imported.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(fsdp, "FSDPModule", None)
    for submodule in module.modules():
        if sharded is not None and isinstance(submodule, sharded):
            submodule.reshard()
