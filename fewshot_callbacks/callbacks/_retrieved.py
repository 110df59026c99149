"""What was retrieved for chosen queries of an evaluated set, wherever its items are: all processes search together."""

from __future__ import annotations

from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.callbacks._targets import TargetBook
from fewshot_callbacks.callbacks._viewers import EvaluatedSet, ItemSet
from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.functional._torch_mode import default_mode
from fewshot_callbacks.functional.neighbours import Neighbours, merged, nearest

# A label as it was given, or the columns of an item's multi-label targets.
Label: TypeAlias = int | str | tuple[int, ...]


def positions_of(items: ItemSet, processes: Processes) -> Int[Tensor, "items"]:
    """Gather the index of each item of all processes in their pass over the loader. Collective."""
    length = sum(processes.gather(len(items.shard.places)))
    return processes.placed(items.shard.positions, items.shard.places, length)


def vectors_at(items: ItemSet, places: Int[Tensor, "chosen"], processes: Processes) -> Float[Tensor, "chosen dim"]:
    """Gather the embeddings of the items at these places. Collective."""
    mine = torch.isin(items.shard.places, places)
    everywhere = processes.gather((items.shard.places[mine], items.shard.embeddings[mine]))
    found = torch.cat([where for where, _ in everywhere])
    vectors = torch.cat([part for where, part in everywhere if len(where)] or [everywhere[0][1]])
    order = found.argsort()
    return vectors[order[torch.searchsorted(found[order], places)]]


def labels_at(
    items: ItemSet, targets: TargetBook | None, places: Int[Tensor, "chosen"], processes: Processes
) -> dict[int, Label]:
    """Gather the label of each item at these places. Collective."""
    shard = items.shard
    mine = torch.isin(shard.places, places)
    codes = shard.labels[mine]
    own: list[Label] = codes.tolist()
    if targets is not None:
        own = [tuple(row.nonzero()[:, 0].tolist()) for row in targets.targets(codes)]
    elif shard.words is not None:
        own = [shard.words[code] for code in codes.tolist()]
    everywhere = processes.gather(dict(zip(shard.places[mine].tolist(), own, strict=True)))
    return {place: label for part in everywhere for place, label in part.items()}


def is_relevant(one: Label, other: Label) -> bool:
    """Decide whether an item of one label is what a query of the other asks for.

    Examples:
        >>> is_relevant("owl", "owl"), is_relevant((0, 2), (2, 5)), is_relevant((0, 2), (1,))
        (True, True, False)
    """
    if isinstance(one, tuple) and isinstance(other, tuple):
        return not set(one).isdisjoint(other)
    return one == other


def retrieved(evaluated: EvaluatedSet, places: Int[Tensor, "chosen"], k: int, processes: Processes) -> Neighbours:
    """Find the first k candidates of the queries at these places; their indices are places in the gallery. Collective."""
    vectors = vectors_at(evaluated.queries, places, processes)
    gallery = evaluated.searched.shard
    own = None if evaluated.gallery is not None else places
    part = _nothing(len(places), k)
    has_candidate = len(gallery.places) > 1 or bool((gallery.places != places).any() if own is not None else True)
    if len(gallery.places) and len(places) and has_candidate:
        part = nearest(
            vectors,
            gallery=gallery.embeddings,
            k=k,
            similarity=evaluated.report.similarity,
            query_ids=own,
            gallery_ids=None if own is None else gallery.places,
            gallery_places=gallery.places,
        )
    return merged(*processes.gather(part))


@default_mode()
def _nothing(queries: int, k: int) -> Neighbours:
    """What a process without a candidate finds."""
    return Neighbours(
        torch.arange(queries),
        torch.full((queries, k), -1),
        torch.full((queries, k), torch.nan, dtype=torch.float64),
        torch.zeros(queries, k, dtype=torch.bool),
        torch.zeros(queries, dtype=torch.int64),
    )
