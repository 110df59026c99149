"""Queries and gallery of an evaluation: what this process holds of them, and what every process knows of all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.engine.codes.packing import Codes, pack_codes
from fewshot_callbacks.engine.exchange import ShardIndex
from fewshot_callbacks.functional._inputs import (
    check_matrix,
    check_sets,
    computable,
    exclusion_codes,
    non_finite_rows,
    refuse_non_finite,
)
from fewshot_callbacks.functional._labels import CodeBook, Labels, check_labels, merged_books, numbered, read_labels
from fewshot_callbacks.functional._tensors import as_tensor


@dataclass(frozen=True)
class RetrievalInputs:
    """See the module. What is known of all is small beside the vectors: one number for each item."""

    queries: Tensor | Codes
    """of this process"""
    gallery: Tensor | Codes
    """of this process, the very queries with one set; packed codes of all, since they are small"""
    query_labels: Int[Tensor, "queries"]
    """of all"""
    gallery_labels: Int[Tensor, "gallery"]
    """of all"""
    codes: dict[str, Tensor | None]
    """ids and groups of all, by the name of the argument"""
    same_set: bool
    share: ShardIndex | None
    """which of all are here; None for one process, which holds everything"""
    label_names: tuple[str, ...] | None = None
    """the word of each label, sorted; None where labels were given as integers"""

    def among_queries_labels(self) -> RetrievalInputs:
        """Without the items of the gallery whose label no query has."""
        known = torch.isin(self.gallery_labels, self.query_labels)
        if bool(known.all()):
            return self
        codes = {
            name: code[known] if code is not None and name.startswith("gallery") else code
            for name, code in self.codes.items()
        }
        here, share = known, self.share
        if share is not None:
            here = known[share.gallery]
            number = known.cumsum(0) - 1
            share = ShardIndex(share.queries, number[share.gallery[here]])
        return replace(
            self, gallery=self.gallery[here], gallery_labels=self.gallery_labels[known], codes=codes, share=share
        )


def collect_inputs(
    call: str,
    processes: Processes,
    embeddings: Any,
    labels: Any,
    gallery: Any,
    gallery_labels: Any,
    *,
    query_ids: Any = None,
    gallery_ids: Any = None,
    query_groups: Any = None,
    gallery_groups: Any = None,
    query_places: Any = None,
    gallery_places: Any = None,
    as_codes: bool = False,
) -> RetrievalInputs:
    """Check the inputs of an evaluation, and make known to every process what it needs of those of the others.

    Args:
        call: who was given them, for messages.
        processes: the others. Each may hold nothing of a set, but must say whether there is a gallery.
        embeddings: queries of this process.
        labels: theirs.
        gallery: items of this process; None for one set.
        gallery_labels: theirs.
        query_ids: identity of each query of this process.
        gallery_ids: identity of each item.
        query_groups: group of each query.
        gallery_groups: group of each item.
        query_places: place of each query of this process among all; by default those of one process follow the other's.
        gallery_places: the same of the gallery.
        as_codes: pack binary codes.

    Raises:
        ValueError: as `evaluate_retrieval` does; the same in every process.
    """
    same_set = gallery is None
    if processes.count == 1:
        if query_places is not None:
            order, embeddings = _ordered(call, "embeddings", embeddings, query_places)
            given = {"labels": labels, "query_ids": query_ids, "query_groups": query_groups}
            labels, query_ids, query_groups = _in_order(call, order, given)
        if gallery_places is not None:
            order, gallery = _ordered(call, "gallery", gallery, gallery_places)
            given = {"gallery_labels": gallery_labels, "gallery_ids": gallery_ids, "gallery_groups": gallery_groups}
            gallery_labels, gallery_ids, gallery_groups = _in_order(call, order, given)
        check = check_code_sets if as_codes else check_sets
        queries, query_labels, items, item_labels = check(call, embeddings, labels, gallery, gallery_labels)
        codes = exclusion_codes(
            call, same_set, len(queries), len(items), query_ids, gallery_ids, query_groups, gallery_groups
        )
        (of_queries, of_items), names = numbered(call, {"labels": query_labels, "gallery_labels": item_labels})
        return RetrievalInputs(queries, items, of_queries, of_items, codes, same_set, None, names)
    if (gallery is None) != (gallery_labels is None):
        raise ValueError(
            f"{call}: gallery and gallery_labels belong together. Pass both, or neither for leave-one-out."
        )
    sides = {"embeddings": (embeddings, labels, query_places)}
    if not same_set:
        sides["gallery"] = (gallery, gallery_labels, gallery_places)
    parts = {name: _part(call, processes, name, *side, as_codes=as_codes) for name, side in sides.items()}
    own = parts["embeddings"]
    others = own if same_set else parts["gallery"]
    if own.dim != others.dim:
        raise ValueError(
            f"{call}: embeddings have dimension {own.dim}, the gallery has {others.dim}. Both must come from the same model."
        )
    queries, items = own.vectors, others.vectors
    if not same_set:
        common = torch.promote_types(queries.dtype, items.dtype)
        queries, items = queries.to(common), items.to(common)
    mine = exclusion_codes(
        call, same_set, len(queries), len(items), query_ids, gallery_ids, query_groups, gallery_groups
    )
    codes = {}
    for name, code in mine.items():
        part = own if name.startswith("query") else others
        codes[name] = None if code is None else processes.placed(code, part.places, part.length)
    (of_queries, of_items), names = numbered(call, {"labels": own.labels, "gallery_labels": others.labels})
    share = ShardIndex(own.places, others.places)
    if as_codes:
        everything = processes.placed(items.T.contiguous(), others.places, others.length).T.contiguous()
        packed = Codes(queries, own.dim), Codes(everything, own.dim)
        share = ShardIndex(own.places, torch.arange(others.length))
        return RetrievalInputs(*packed, of_queries, of_items, codes, same_set, share, names)
    return RetrievalInputs(queries, queries if same_set else items, of_queries, of_items, codes, same_set, share, names)


@dataclass(frozen=True)
class _Part:
    vectors: Tensor
    dim: int
    """components, or bits of packed codes"""
    labels: Labels
    """of all"""
    places: Tensor
    length: int
    """number of all"""


def _part(
    call: str, processes: Processes, name: str, vectors: Any, labels: Any, places: Any, *, as_codes: bool
) -> _Part:
    """One side: what is here, and the labels of all."""
    vectors = as_tensor(vectors, name, call).cpu()
    items = len(vectors) if vectors.ndim else 0
    label_name = "labels" if name == "embeddings" else "gallery_labels"
    own_labels = read_labels(labels, items, label_name, name, call)
    dim = 0
    if items:
        if as_codes:
            codes = pack_codes(vectors, name, call)
            vectors, dim = codes.words, codes.bits
        else:
            check_matrix(vectors, name, call)
            vectors, dim = computable(vectors), vectors.shape[1]
    everyone = processes.gather(((items, dim, vectors.dtype, vectors.shape[-1]), own_labels.words))
    known = [size for size, _ in everyone]
    holders = [(rank, *rest) for rank, rest in enumerate(known) if rest[0]]
    if not holders:
        raise ValueError(f"{call}: {name} is empty (shape (0, {dim})) in every process. Pass at least one item.")
    for rank, _, other, *_ in holders:
        if other != holders[0][2]:
            raise ValueError(
                f"{call}: {name} have dimension {holders[0][2]} in process {holders[0][0]}, {other} in process {rank}. All "
                "must come from the same model."
            )
    words = _words_of_all(call, label_name, [(rank, everyone[rank][1]) for rank, *_ in holders])
    dtype = holders[0][3]
    for holder in holders[1:]:
        dtype = torch.promote_types(dtype, holder[3])
    vectors = vectors.to(dtype) if items else torch.empty(0, holders[0][4], dtype=dtype)
    counts = [held[0] for held in known]
    length, first = sum(counts), sum(counts[: processes.rank])
    if places is None:
        places = torch.arange(first, first + items)
    places = check_labels(places, items, "places", name, call)
    _check_places(call, name, torch.cat(processes.gather(places)))
    bad = torch.empty(0, dtype=torch.int64) if as_codes else places[non_finite_rows(vectors)]
    refuse_non_finite(torch.cat(processes.gather(bad)).sort().values, length, name, call)
    return _Part(
        vectors, holders[0][2], Labels(processes.placed(own_labels.codes, places, length), words), places, length
    )


def _words_of_all(call: str, name: str, holders: list[tuple[int, CodeBook | None]]) -> CodeBook | None:
    """One code book of the processes that hold labels, by rank; all of them must hold words, or all integers."""
    (first, book), kinds = holders[0], ("integers", "words")
    for rank, other in holders:
        if (other is None) != (book is None):
            raise ValueError(
                f"{call}: {name} are {kinds[book is not None]} in process {first}, {kinds[other is not None]} in process "
                f"{rank}. Pass the same in every process."
            )
    return merged_books((held for _, held in holders), call)


def _ordered(call: str, name: str, vectors: Any, places: Any) -> tuple[Int[Tensor, "items"], Tensor]:
    """Which item comes first, second and so on in one process, which holds all; and the vectors in this order."""
    vectors = as_tensor(vectors, name, call)
    places = check_labels(places, len(vectors) if vectors.ndim else 0, "places", name, call)
    _check_places(call, name, places)
    order: Tensor = places.argsort()
    return order, vectors[order]


def _check_places(call: str, name: str, places: Int[Tensor, "items"]) -> None:
    """Refuse places of all items that are not each of 0, 1, 2, ... once."""
    if not torch.equal(places.sort().values, torch.arange(len(places))):
        raise ValueError(
            f"{call}: the places of {name} must be 0 to {len(places) - 1}, each once over all processes. Drop repeated "
            "items first."
        )


def _in_order(call: str, order: Tensor, labels: dict[str, Any]) -> list[Labels | None]:
    """Labels, ids or groups of one process, by the name of the argument."""
    return [
        None if value is None else read_labels(value, len(order), name, "items", call)[order]
        for name, value in labels.items()
    ]


def check_code_sets(
    call: str, codes: Any, labels: Any, gallery: Any, gallery_labels: Any
) -> tuple[Codes, Labels, Codes, Labels]:
    """Packed queries, labels, gallery and labels; with one set the gallery is the very codes of the queries."""
    queries = (
        codes if isinstance(codes, Codes) else pack_codes(as_tensor(codes, "embeddings", call), "embeddings", call)
    )
    query_labels = read_labels(labels, len(queries), "labels", "codes", call)
    if gallery is None and gallery_labels is None:
        return queries, query_labels, queries, query_labels
    if gallery is None or gallery_labels is None:
        raise ValueError(
            f"{call}: gallery and gallery_labels belong together. Pass both, or neither for leave-one-out."
        )
    items = gallery if isinstance(gallery, Codes) else pack_codes(as_tensor(gallery, "gallery", call), "gallery", call)
    if items.bits != queries.bits:
        raise ValueError(
            f"{call}: codes of {queries.bits} bits cannot be compared with a gallery of {items.bits} bits. Both must come "
            "from the same model."
        )
    return (
        queries,
        query_labels,
        items,
        read_labels(gallery_labels, len(items), "gallery_labels", "gallery codes", call),
    )
