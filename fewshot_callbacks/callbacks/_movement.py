"""How far a sample of a validation set has moved since the first and the previous validation."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.functional.movement import embedding_movement
from fewshot_callbacks.metrics.embedding_store import Shard
from fewshot_callbacks.trainer.lightning import LightningModule, Trainer
from fewshot_callbacks.trainer.loaders import evaluation_loaders

# Largest number of compared items: CKA needs a square matrix of this size, 8 MB.
SAMPLED_ITEMS = 1024

MOVEMENTS = ("cosine_to_first", "cosine_to_previous", "cka_to_first")

# Below this CKA to the first validation, its arrangement is lost.
NOTHING_LEFT = 0.1


@dataclass(frozen=True)
class SampledItems:
    """Items of a set at one validation, in the order of the data set."""

    names: tuple[object, ...]
    """id or label of each, which show another order of the data"""
    embeddings: Tensor
    """(sampled items, dim)"""
    items: int
    """number of items in the whole set"""
    step: int
    """number of optimiser steps before this validation"""

    def is_of_same_items(self, other: SampledItems) -> bool:
        """Return whether another sample has the same items, as far as their names show."""
        same_sizes = self.items == other.items and self.embeddings.shape == other.embeddings.shape
        return same_sizes and self.names == other.names


def sample_of(shard: Shard, step: int, processes: Processes) -> SampledItems | None:
    """Return a fixed sample of all processes' items on the first process; None on the others. *Collective*."""
    items = sum(processes.gather(len(shard.embeddings)))
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(items, generator=generator)[:SAMPLED_ITEMS].sort().values
    rows = torch.isin(shard.places, places)
    column = shard.labels if shard.ids is None else shard.ids
    # Without labels all items have the label 0.
    part = (shard.places[rows], column[rows].tolist(), shard.embeddings[rows])
    parts = processes.to_first(part)
    if parts is None:
        return None
    order = torch.cat([part_places for part_places, _, _ in parts]).argsort()
    names = [name for _, part_names, _ in parts for name in part_names]
    # A process without items has no dimension.
    embeddings = torch.cat([rows for _, _, rows in parts if len(rows)] or [shard.embeddings])
    return SampledItems(tuple(names[row] for row in order.tolist()), embeddings[order].clone(), items, step)


def has_fixed_order(trainer: Trainer, loader: int) -> bool:
    """Return whether a loader's sampler has a fixed order."""
    dataloader = list(evaluation_loaders(trainer).values())[loader]
    sampler = getattr(dataloader, "sampler", None)
    # A DistributedSampler has the attribute `shuffle`.
    return not isinstance(sampler, RandomSampler) and not getattr(sampler, "shuffle", False)


def notes_on_nan(values: Mapping[str, float]) -> list[str]:
    """Return why some of the values are NaN."""
    cosines = [name for name in MOVEMENTS[:2] if math.isnan(values.get(name, 0.0))]
    notes = []
    if cosines:
        notes.append(
            f"{', '.join(cosines)} are NaN, because all embeddings have length zero at one of the two validations."
        )
    if math.isnan(values.get(MOVEMENTS[2], 0.0)):
        notes.append(
            f"{MOVEMENTS[2]} is NaN, because it needs at least four items that are not all equal, at both validations."
        )
    return notes


class MovementOfSet:
    """Keeps the sample of a set at its first and its latest validation."""

    def __init__(self) -> None:
        self._first: SampledItems | None = None
        self._previous: SampledItems | None = None
        # the module of these embeddings; a weak reference does not keep it alive
        self._module: weakref.ref[LightningModule] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the weak reference. A copy starts anew."""
        return vars(self) | {"_module": None}

    def compare(self, sample: SampledItems, module: LightningModule) -> tuple[dict[str, float], str | None]:
        """Compare a sample with the earlier samples, and keep it.

        Another module starts anew.

        Returns:
            Name -> value, and a warning if nothing has moved or nothing is left. They are empty and None at the first
            validation, with other items, and without an optimiser step in between.
        """
        first = self._first
        previous = self._previous
        is_other_module = self._module is None or self._module() is not module
        is_first = first is None or is_other_module or not sample.is_of_same_items(first)
        if first is None or previous is None or is_first:
            self._first = sample
            self._previous = sample
            self._module = weakref.ref(module)
            return {}, None
        if sample.step == previous.step:
            return {}, None
        self._previous = sample
        to_first = embedding_movement(first.embeddings, sample.embeddings)
        to_previous = embedding_movement(previous.embeddings, sample.embeddings)
        values = {
            "cosine_to_first": to_first.cosine,
            "cosine_to_previous": to_previous.cosine,
            "cka_to_first": to_first.cka,
        }
        compared = f"{to_previous.items:,} of {sample.items:,} items are compared"
        if to_previous.unmoved == 1:
            return values, (
                f"no embedding has changed in the {sample.step - previous.step:,} optimiser steps since the previous "
                f"validation ({compared}). Its weights are not trained. Look for a frozen encoder, an adapter that was not "
                "loaded or is not active, parameters that are missing from the optimiser, or a learning rate of 0."
            )
        if to_first.cka < NOTHING_LEFT:
            return values, (
                f"nothing is left of the arrangement of the first validation: CKA is {to_first.cka:.2f} ({compared}). If "
                "you train from random weights, you can expect this. A pretrained model has lost its weights: check the "
                "learning rate and the loaded checkpoint."
            )
        return values, None
