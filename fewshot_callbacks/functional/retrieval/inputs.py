"""Queries and gallery of an evaluation, and their relevance by labels or by judgements."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from fewshot_callbacks.engine.relevance import PairRelevance
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import Labels, as_labels, hashes_of_labels
from fewshot_callbacks.functional._repeated import Copies
from fewshot_callbacks.functional.item_reader import read_items
from fewshot_callbacks.functional.items import ItemSets, Share
from fewshot_callbacks.functional.retrieval.relevance import Absent, Relevance, judged_items
from fewshot_callbacks.functional.retrieval.slices import (
    Attribute,
    encode_slices,
    refuse_many_slices,
    slices_argument,
)
from fewshot_callbacks.settings import Similarity
from fewshot_callbacks.system.words import counted


@dataclass(frozen=True, eq=False)
class RetrievalInputs(ItemSets):
    """The queries and the gallery of an evaluation. With judgements, the column `labels` has the cluster of each query."""

    judgements: Relevance | None = None
    """relevance of all processes' items to all processes' queries; None if it follows from labels"""
    copies_of_queries: Copies | None = None
    """copies among the candidates of each query; None if the caller passed a `Relevance`"""
    drawn: Int[Tensor, "queries"] | None = None
    """index of each sampled query among all queries, ascending; None for all queries"""
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    """attribute -> its value for each query of all processes"""

    def relevance(
        self,
    ) -> tuple[PairRelevance, Shaped[np.ndarray, "pairs"] | None, Absent | None]:
        """Return the relevant items of this process's queries, their grades, and relevant items without a row.

        Grades are None if all are 1. Items without a row are None if there are none. Item indices begin with the items of
        this process (see `engine.tiles`). *Collective*.
        """
        rules = self.rules()
        if self.judgements is None:
            return self.relevance_of_labels(rules), None, None
        places = self.queries.places if self.drawn is None else self.drawn[self.queries.places]
        judgements = self.judgements.part(places.numpy(), rules.places)
        judged = judged_items(judgements)
        symmetric = self.is_one_set and judgements.mutual
        relevance = PairRelevance(judged.relevant, rules.self_match, rules.codes, judged.ignored, symmetric)
        return relevance, judged.grades, judged.absent

    def sample(self, drawn: Int[Tensor, "drawn"]) -> RetrievalInputs:
        """Return the inputs with only the queries at these ascending indices, and with the whole gallery."""
        copies = self.copies_of_queries
        return replace(
            self,
            queries=self.queries.take(drawn, None),
            self_match=None if self.self_match is None else self.self_match[drawn],
            copies_of_queries=None if copies is None else replace(copies, counts=copies.counts[drawn.numpy()]),
            drawn=drawn,
            attributes={name: attribute.of_queries(drawn) for name, attribute in self.attributes.items()},
        )

    @property
    def query_ids_digest(self) -> str | None:
        """The digest of the ids of the queries in their order; None without ids."""
        hashes = self.queries.columns.get("id_hashes")
        return None if hashes is None else _digest(hashes.numpy())

    @property
    def gallery_digest(self) -> str:
        """The digest of the labels of the gallery items in any order, or of the relevance that replaces labels."""
        if self.judgements is not None:
            return self.judgements.digest()
        return _digest(self._hashes_of_gallery_labels().sort().values.numpy())

    @property
    def gallery_ids_digest(self) -> str | None:
        """The digest of the ids of the gallery items in any order, with their labels; None without ids."""
        hashes = self.gallery.columns.get("id_hashes")
        if hashes is None:
            return None
        items = np.stack([self._hashes_of_gallery_labels().numpy(), hashes.numpy()], axis=1)
        return _digest(items[np.lexsort(items.T)])

    def _hashes_of_gallery_labels(self) -> Int[Tensor, "items"]:
        """Return 64 bits for the label of each gallery item. They do not depend on the other labels."""
        if self.label_names is None:
            return self.gallery.labels
        names = as_labels(self.label_names, "labels", "evaluate_retrieval")
        return hashes_of_labels(names)[self.gallery.labels]

    def as_one_set(self) -> RetrievalInputs:
        """Return the inputs as one set if ids or groups show that they are, see `ItemSets.as_one_set`. *Collective*."""
        if self.drawn is not None or self.judgements is not None:
            return self
        sets = super().as_one_set()
        assert isinstance(sets, RetrievalInputs)
        return sets


def _digest(integers: Int[np.ndarray, "*shape"]) -> str:
    return hashlib.blake2b(integers.astype("<i8").tobytes(), digest_size=16).hexdigest()


def collect_inputs(
    call: str,
    share: Share,
    queries: Any,
    query_labels: Any,
    gallery: Any,
    gallery_labels: Any,
    *,
    similarity: Similarity = "cosine",
    relevance: Relevance | None = None,
    slices: Mapping[str, Labels] | None = None,
    memory: float = math.inf,
    **ids_and_groups: Any,
) -> RetrievalInputs:
    """Read the items of an evaluation, and count the copies of the queries. *Collective*.

    Arguments are as in `evaluate_retrieval`. `slices` has the value of each query of this process by attribute.
    `memory` is in bytes.
    """
    if relevance is not None and (query_labels is not None or gallery_labels is not None):
        raise InputError(f"{call}: relevance and labels both define which items are relevant. Pass one of them.")
    codes, names_of_slices = encode_slices(call, slices or {}, share.processes)
    columns = {f"query_{name}": values for name, values in codes.items()}
    sets = read_items(
        call,
        queries,
        gallery,
        {"query_labels": query_labels, "gallery_labels": gallery_labels, **ids_and_groups, **columns},
        share=share,
        similarity=similarity,
        memory=memory,
        labelled=relevance is None,
    )
    copies = None
    if relevance is None:
        sets = sets.hashed()
        copies = sets.copies()
        names = sets.label_names
        if names is not None and isinstance(names[0], tuple):
            relevance = _relevance_of_sets(names, sets)
            sets = replace(sets, label_names=None)
    else:
        _refuse_repeated(call, sets)
    if relevance is not None:
        sets = _with_clusters(call, relevance, sets)
    attributes = {
        name: Attribute.of_codes(sets.queries.columns[slices_argument(name)], names)
        for name, names in names_of_slices.items()
    }
    classes = len(sets.queries.labels.unique())
    values = {name: len(attribute.names) for name, attribute in attributes.items()}
    refuse_many_slices(call, values, classes, f"the queries have {counted(classes, 'class')}")
    return RetrievalInputs(**vars(sets), judgements=relevance, copies_of_queries=copies, attributes=attributes)


def _refuse_repeated(call: str, sets: ItemSets) -> None:
    """Raise an error if items repeat an id although the relevance refers to all rows."""
    for items in (sets.queries, sets.gallery):
        if items.length < items.given:
            raise InputError(
                f"{call}: relevance refers to all rows, but {items.given - items.length:,} of them repeat an id. Pass each "
                "item once, and a relevance for these rows."
            )


def _relevance_of_sets(names: Sequence[tuple[int, ...]], sets: ItemSets) -> Relevance:
    """Return the relevance if the label of each query and item is the index of a set of labels."""
    of_queries = [names[number] for number in sets.queries.labels.tolist()]
    if sets.same_set:
        return Relevance.from_label_sets(of_queries)
    of_items = [names[number] for number in sets.gallery.labels.tolist()]
    return Relevance.from_label_sets(of_queries, of_items)


def _with_clusters(call: str, relevance: Relevance, sets: ItemSets) -> ItemSets:
    """Return the items with the queries' clusters as labels. Without clusters in the relevance, each query is a cluster."""
    queries = sets.queries.length
    gallery = sets.gallery.length
    if (relevance.queries, relevance.gallery, relevance.one_set) != (queries, gallery, sets.same_set):
        are = (
            f"{counted(queries, 'query')} in one set"
            if sets.same_set
            else f"{counted(queries, 'query')} and {counted(gallery, 'gallery item')}"
        )
        raise InputError(
            f"{call}: the relevance is {relevance}, but you passed {are}. Make it for the rows that you pass. If there is a "
            "gallery, make it with gallery_ids or with the number of gallery items."
        )
    clusters = torch.arange(queries) if relevance.clusters is None else torch.from_numpy(relevance.clusters)
    of_items = torch.zeros(gallery, dtype=torch.int64)
    return replace(
        sets, queries=sets.queries.with_columns(labels=clusters), gallery=sets.gallery.with_columns(labels=of_items)
    )
