"""Queries and gallery of an evaluation: items, and who is relevant to whom, by labels or by judgements."""

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
    """The queries and the gallery of an evaluation. With judgements, the column `labels` holds the cluster of each query."""

    judgements: Relevance | None = None
    """which items are relevant to which queries, of all processes; None if labels say it"""
    copies_of_queries: Copies | None = None
    """copies among the candidates of each query; None with judgements of the caller"""
    drawn: Int[Tensor, "queries"] | None = None
    """index among all queries of each query of a sample, ascending; None for all queries"""
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    """attribute -> its value for each query of all processes"""

    def relevance(
        self,
    ) -> tuple[PairRelevance, Shaped[np.ndarray, "pairs"] | None, Absent | None]:
        """Return who is relevant to the queries of this process, with grades, and relevant items without a row. Collective.

        Grades are None if all are 1, and items without a row if there are none. Items are numbered from those of this
        process on, see `engine.tiles`.
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
        """Keep the queries with these places, ascending, and the whole gallery."""
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
        """The digest of the labels of the gallery items in any order, or of the relevance in place of labels."""
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
        """Return 64 bits for the label of each gallery item; they do not depend on which other labels there are."""
        if self.label_names is None:
            return self.gallery.labels
        names = as_labels(self.label_names, "labels", "evaluate_retrieval")
        return hashes_of_labels(names)[self.gallery.labels]

    def as_one_set(self) -> RetrievalInputs:
        """Take queries and gallery as one set where ids or groups say the same, see `ItemSets.as_one_set`. Collective."""
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

    Args:
        call: The public function, for messages.
        share: The share of this process.
        queries: Queries of this process.
        query_labels: Labels of the queries.
        gallery: Gallery items of this process; None for one set.
        gallery_labels: Labels of the gallery items.
        similarity: How they will be compared.
        relevance: Who is relevant, in place of labels: of all queries and items.
        slices: Attribute -> its value for each query of this process.
        memory: Budget in bytes.
        **ids_and_groups: Ids and groups of the items of this process.

    Raises:
        ValueError: As `evaluate_retrieval` does; the same in every process.
    """
    if relevance is not None and (query_labels is not None or gallery_labels is not None):
        raise InputError(f"{call}: relevance and labels both say who is relevant. Pass one of them.")
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
    """Refuse items that repeat an id where a relevance of all rows is given."""
    for items in (sets.queries, sets.gallery):
        if items.length < items.given:
            raise InputError(
                f"{call}: relevance is of all rows, and {items.given - items.length:,} of them repeat an id. Pass each item "
                "once, and the relevance of these."
            )


def _relevance_of_sets(names: Sequence[tuple[int, ...]], sets: ItemSets) -> Relevance:
    """Return who is relevant where the label of each query and item is the number of a set of labels."""
    of_queries = [names[number] for number in sets.queries.labels.tolist()]
    if sets.same_set:
        return Relevance.from_label_sets(of_queries)
    of_items = [names[number] for number in sets.gallery.labels.tolist()]
    return Relevance.from_label_sets(of_queries, of_items)


def _with_clusters(call: str, relevance: Relevance, sets: ItemSets) -> ItemSets:
    """Return the items with clusters as labels of the queries; each query is a cluster, if the relevance names none.

    Raises:
        ValueError: If the relevance is of other sets.
    """
    queries = sets.queries.length
    gallery = sets.gallery.length
    if (relevance.queries, relevance.gallery, relevance.one_set) != (queries, gallery, sets.same_set):
        are = (
            f"{counted(queries, 'query')} in one set"
            if sets.same_set
            else f"{counted(queries, 'query')} and {counted(gallery, 'gallery item')}"
        )
        raise InputError(
            f"{call}: the relevance is {relevance}, but there are {are}. Make it for the rows that are passed, with "
            "gallery_ids or the number of gallery items where there is a gallery."
        )
    clusters = torch.arange(queries) if relevance.clusters is None else torch.from_numpy(relevance.clusters)
    of_items = torch.zeros(gallery, dtype=torch.int64)
    return replace(
        sets, queries=sets.queries.with_columns(labels=clusters), gallery=sets.gallery.with_columns(labels=of_items)
    )
