"""What protonet and callbacks read off a running Trainer, where Lightning has no public word for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.utils.data import DistributedSampler


def evaluation_loaders(trainer: Trainer) -> dict[str, Any]:
    """The loaders of the validation or test that runs now, in the order of `dataloader_idx`, by name.

    Loaders that were given as a dictionary keep their keys; those of a list, or nested ones, are `dataloader_idx_0` and
    so on. A `CombinedLoader` that draws from several at a time is one stream of batches, and so is one loader.
    """
    # Not `Trainer.val_dataloaders`: in `validate` after `fit` it still gives the loaders of `fit`.
    if trainer.state.fn == TrainerFn.TESTING:
        loop = trainer.test_loop
    elif trainer.state.fn == TrainerFn.VALIDATING:
        loop = trainer.validate_loop
    else:
        loop = trainer.fit_loop.epoch_loop.val_loop
    combined = loop._combined_loader
    if combined is None:
        return {}
    if combined._mode != "sequential":
        return {"dataloader_idx_0": combined}
    if isinstance(combined.iterables, dict) and len(combined.iterables) == len(combined.flattened):
        return {str(name): loader for name, loader in combined.iterables.items()}
    return {f"dataloader_idx_{i}": loader for i, loader in enumerate(combined.flattened)}


def dealt_items(loader: Any) -> int | None:
    """How many items a `DistributedSampler` deals out to the ranks, before it repeats some; None without one."""
    sampler = getattr(loader, "sampler", None)
    return len(sampler.dataset) if isinstance(sampler, DistributedSampler) else None  # type: ignore[arg-type]


def on_device(trainer: Trainer, batch: Any) -> Any:
    """A batch of a loader that Lightning does not know, brought where and as it brings those that it knows."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """No gradients and all submodules in evaluation mode inside the block; then each in its own mode, as before.

    The random states are what they were, too, also after an error, where `isolate_rng` alone would leave them.
    """
    modes, failure = [(part, part.training) for part in module.modules()], None
    module.eval()
    try:
        with isolate_rng(), torch.no_grad():
            try:
                yield
            except BaseException as error:
                failure = error
    finally:
        for part, training in modes:
            part.training = training
    if failure is not None:
        raise failure
