"""What protonet and callbacks read off a running Trainer, where Lightning has no public word for it."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.utils.data import DistributedSampler

from fewshot_callbacks.distributed.torch_distributed import process_count

# Packages whose functions may stand between the line of a user, such as `trainer.fit(...)`, and a warning.
_BETWEEN = (
    "contextlib",
    "functools",
    "fewshot_callbacks",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "pytorch_lightning",
    "torch",
)


def evaluation_loaders(trainer: Trainer) -> dict[str, Any]:
    """The loaders of the validation or test that runs now, in the order of `dataloader_idx`, by name.

    Loaders that were given as a dictionary keep their keys; those of a list, or nested ones, are `dataloader_idx_0` and
    so on. A `CombinedLoader` that draws from several at a time is one stream of batches, and so is one loader.
    """
    # Not `Trainer.val_dataloaders`: in `validate` after `fit` it still gives the loaders of `fit`.
    others: dict[Any, Any] = {TrainerFn.TESTING: trainer.test_loop, TrainerFn.VALIDATING: trainer.validate_loop}
    loop = others.get(trainer.state.fn, trainer.fit_loop.epoch_loop.val_loop)
    combined = loop._combined_loader
    if combined is None:
        return {}
    if combined._mode != "sequential":
        return {"dataloader_idx_0": combined}
    if isinstance(combined.iterables, dict) and len(combined.iterables) == len(combined.flattened):
        return {str(name): loader for name, loader in combined.iterables.items()}
    return {f"dataloader_idx_{i}": loader for i, loader in enumerate(combined.flattened)}


def unpadded_length(loader: Any) -> int | None:
    """Number of items that a `DistributedSampler` deals to all ranks before it pads; None without such a sampler."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.num_replicas != process_count():
        return None
    return len(sampler.dataset)  # type: ignore[arg-type]


def why_not_dealt(loader: Any, batches: int, items: int) -> str | None:
    """Say why the i-th of this rank's items need not be the i-th that a `DistributedSampler` dealt to it; None if it is.

    Args:
        loader: The loader.
        batches: How many of its batches this rank was given.
        items: How many embeddings these gave.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return f"the sampler ({type(sampler).__name__}) is not Lightning's DistributedSampler"
    if sampler.num_replicas != process_count():
        return f"there are {process_count()} processes, and the sampler is set up for {sampler.num_replicas}"
    wanted = items_of_batches(loader, batches)
    return None if wanted == items else f"its steps gave {items} embeddings for {wanted} samples"


def items_of_batches(loader: Any, batches: int) -> int:
    """Number of samples that a loader of one sampler gives in `batches` batches (of 1 without a batch size)."""
    size = getattr(loader, "batch_size", None)
    return min(batches * (1 if size is None else size), len(loader.sampler))


def log_of_all(module: LightningModule, values: Mapping[str, float], shown: str | None = None) -> None:
    """Log values of an epoch that are equal on all ranks, or of which the largest counts; one is shown in the bar."""
    options: dict[str, Any] = {"on_step": False, "on_epoch": True, "add_dataloader_idx": False, "batch_size": 1}
    if process_count() > 1:  # a maximum, so that Lightning does not warn of values that it has not reduced
        options |= {"sync_dist": True, "reduce_fx": "max"}
    for key, value in values.items():
        module.log(key, value, prog_bar=key == shown, **options)


def names_logged(trainer: Trainer) -> set[str]:
    """Return the names under which a value of this epoch has been logged so far."""
    results = trainer._results
    if results is None:
        return set()
    logged = [each for each in results.values() if not each.has_reset and each.meta.on_epoch]
    return {results._forked_name(each, on_step=False)[0] for each in logged}


def run_folder(trainer: Trainer, logger: Any = None) -> str:
    """Find the folder of the run by a logger, by default the first one.

    Not `Trainer.log_dir`, for which all ranks have to ask together.
    """
    logger = next(iter(trainer.loggers), None) if logger is None else logger
    if logger is None:
        return trainer.default_root_dir
    if logger.log_dir is not None:
        return str(logger.log_dir)
    # of a logger whose runs share a folder
    return os.path.join(logger.save_dir or trainer.default_root_dir, str(logger.name), str(logger.version))


def on_device(trainer: Trainer, batch: Any) -> Any:
    """A batch of a loader that Lightning does not know, brought where and as it brings those that it knows."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Afterwards the random states are what they were, also after an error."""
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None  # which `isolate_rng` leaves out
    keeping = isolate_rng()
    keeping.__enter__()
    try:
        yield
    finally:
        keeping.__exit__(None, None, None)  # told of an error, it would leave the states as they are
        if mps is not None:
            torch.mps.set_rng_state(mps)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """No gradients and all submodules in evaluation mode inside the block; then each in its own mode, as before.

    The random states are what they were, too.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with random_states_kept(), torch.no_grad():
            yield
    finally:
        # Set directly: `train(mode)` sets the submodules as well, and a module may override it, to keep some of them
        # frozen.
        for part, training in modes:
            part.training = training


@contextmanager
def without_side_effects(module: nn.Module, seed: int) -> Iterator[None]:
    """Make forward passes as in a training step, without side effects.

    Submodules stay in the modes that they are in, and no gradient is taken. Afterwards the buffers (running statistics)
    and the random states are what they were, to the last bit. Inside, the random states start from `seed`: two blocks
    with one seed draw the same dropout.
    """
    buffers = [
        (part._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
    ]
    try:
        with random_states_kept(), torch.no_grad():
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002 - the global state is what a module may draw from
            yield
    finally:
        with torch.no_grad():
            for holder, name, buffer, copy in buffers:
                holder[name] = buffer  # a module may have put another in its place
                if buffer is not None and copy is not None:
                    buffer.copy_(copy)


# Number of bytes of an element -> the integers of this size, as which its bits are read.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights_mark(module: nn.Module) -> list[int]:
    """Return a number for each parameter that is another one once its values are others.

    It is a sum of the bits of this process's part of the values, read as integers: exact, whatever the device. Sums of the
    rows and of the columns have factors, so that exchanged values do not go unseen. A parameter whose bits cannot be read,
    such as one without memory, has no number.
    """
    marks = []
    for parameter in module.parameters():
        # A part of a parameter that several processes share must not be exchanged with them.
        values = parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()
        try:
            bits = values.contiguous().view(_INTEGERS[values.element_size()])
            rows = bits.reshape(len(bits) if bits.ndim else 1, -1)
            of_columns, of_rows = (rows.sum(dim=dim, dtype=torch.int64) for dim in (0, 1))
            mark = (of_columns * _odd_numbers(of_columns)).sum() + (of_rows * _odd_numbers(of_rows)).sum()
            marks.append(mark.cpu())
        except (KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
            continue
    return [int(mark) for mark in marks]


def _odd_numbers(like: torch.Tensor) -> torch.Tensor:
    return 2 * torch.arange(len(like), device=like.device) + 1


@rank_zero_only
def warn(words: str) -> None:
    """Warn on the first rank, whether or not Python has shown the same words before, at the line of the user's own code.

    `warnings.warn` notes in the calling module what it has shown, and does not show it again in the same process, so that
    a second fit in a notebook would say nothing. `warn_explicit` without such a record shows it. Filters apply as usual.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "")
    warnings.warn_explicit(words, UserWarning, frame.f_code.co_filename, frame.f_lineno, module)
