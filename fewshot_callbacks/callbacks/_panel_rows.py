"""Queries and their neighbours, found by all processes, as rows of panels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from fewshot_callbacks.callbacks._retrieved import Label, is_relevant, labels_at, positions_of, retrieved
from fewshot_callbacks.callbacks._viewers import EvaluatedSet
from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.functional.neighbours import Neighbours
from fewshot_callbacks.plots.panels import Item, Neighbour, PanelRow

# A function of the position of an item in its loader and of its label.
Shown = Callable[[int, Label], Item]


@dataclass(frozen=True, eq=False)
class Answers:
    """What was retrieved for some queries, the same in every process."""

    # place of each query among all
    places: list[int]
    found: Neighbours
    # place of a query -> its label
    query_labels: dict[int, Label]
    # place of a neighbour -> its label
    gallery_labels: dict[int, Label]
    # index of each query of the set in its loader
    query_positions: Int[Tensor, "queries"]
    # index of each gallery item in its loader
    gallery_positions: Int[Tensor, "gallery"]

    @classmethod
    def of(cls, evaluated: EvaluatedSet, places: Sequence[int], k: int, processes: Processes) -> Answers:
        """Search for the neighbours of the queries at these places. Collective."""
        wanted = torch.tensor(places, dtype=torch.int64, device="cpu")
        found = retrieved(evaluated, wanted, k, processes)
        neighbours = found.indices[found.indices >= 0].unique()
        positions = positions_of(evaluated.queries, processes)
        searched = positions if evaluated.gallery is None else positions_of(evaluated.gallery, processes)
        return cls(
            list(places),
            found,
            labels_at(evaluated.queries, evaluated.targets, wanted, processes),
            labels_at(evaluated.searched, evaluated.targets, neighbours, processes),
            positions,
            searched,
        )

    def neighbours(self, place: int) -> list[tuple[int, float, bool, bool]]:
        """List the neighbours of a query: place, score, whether it is relevant, whether its score is another one's, too."""
        row = self.places.index(place)
        label = self.query_labels[place]
        columns = (self.found.indices[row], self.found.scores[row], self.found.tied[row])
        return [
            (other, score, is_relevant(label, self.gallery_labels[other]), tied)
            for other, score, tied in zip(*(column.tolist() for column in columns), strict=True)
            if other >= 0
        ]

    def mistakes(self, count: int) -> list[int]:
        """Choose the queries whose first neighbour is irrelevant and has the highest score."""
        first = {place: self.neighbours(place)[:1] for place in self.places}
        scores = {place: found[0][1] for place, found in first.items() if found and not found[0][2]}
        return sorted(scores, key=lambda place: (-scores[place], place))[:count]

    def needed(self) -> tuple[set[int], set[int]]:
        """Return the positions of the queries, and of their neighbours."""
        return {int(self.query_positions[place]) for place in self.places}, {
            int(self.gallery_positions[place]) for place in self.gallery_labels
        }

    def row(self, place: int, caption: str, query: Shown, neighbour: Shown) -> PanelRow:
        """Lay out a query with its neighbours."""
        position = int(self.query_positions[place])
        shown = [
            Neighbour(neighbour(int(self.gallery_positions[other]), self.gallery_labels[other]), score, relevant, tied)
            for other, score, relevant, tied in self.neighbours(place)
        ]
        return PanelRow(query(position, self.query_labels[place]), shown, f"item {position:,}, {caption}")
