"""Context managers that restore a module and the random states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from fewshot_callbacks.trainer.lightning import isolate_rng
from fewshot_callbacks.trainer.sharded import reshard


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put all submodules in evaluation mode inside the block, without gradients.

    Afterwards each submodule has its previous mode, the random states are restored, and the weights of sharded modules
    are sharded again.
    """
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        with preserved_random_states(), torch.no_grad():
            yield
    finally:
        reshard(module)
        # `train(mode)` would also set the submodules, and a module may override it to keep some of them frozen.
        for submodule, training in modes:
            submodule.training = training


@contextmanager
def without_side_effects(module: nn.Module, seed: int) -> Iterator[None]:
    """Run forward passes as in a training step, without side effects.

    Submodules keep their modes, and no gradient is computed. Afterwards the buffers (running statistics) and the random
    states are restored bit for bit, and the weights of sharded modules are sharded again. Inside, the random states
    start from `seed`: two blocks with one seed draw the same dropout.
    """
    buffers = [
        (submodule._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
        for submodule in module.modules()
        for name, buffer in submodule._buffers.items()
    ]
    try:
        with preserved_random_states(), torch.no_grad():
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002 - a module may draw from the global state
            yield
    finally:
        reshard(module)
        with torch.no_grad():
            for holder, name, buffer, copy in buffers:
                holder[name] = buffer  # a module may have replaced it
                if buffer is not None and copy is not None:
                    buffer.copy_(copy)


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Restore the random states after the block, even after an error."""
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None  # `isolate_rng` leaves it out
    isolation = isolate_rng()
    isolation.__enter__()
    try:
        yield
    finally:
        isolation.__exit__(None, None, None)  # with an error, it would not restore the states
        if mps is not None:
            torch.mps.set_rng_state(mps)
