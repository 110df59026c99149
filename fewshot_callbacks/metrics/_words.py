"""Reads the batches of a metric, and encodes word labels as its state, which holds only tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from fewshot_callbacks.functional._labels import CodeBook, Labels, book_of, labels_of_each
from fewshot_callbacks.functional._tensors import as_tensor


def as_state(book: CodeBook) -> UInt8[Tensor, "bytes"]:
    """Encode the words of a code book as bytes, which can be joined to those of other batches and processes."""
    return torch.frombuffer(bytearray(json.dumps(sorted(book.values())).encode() + b"\n"), dtype=torch.uint8)


def words_held(states: Sequence[Tensor] | Tensor) -> CodeBook | None:
    """Decode the code book of what `as_state` made, of one batch or joined; None where there is none."""
    joined = states if isinstance(states, Tensor) else torch.cat(list(states)) if states else torch.empty(0)
    if not joined.numel():
        return None
    lines = joined.cpu().numpy().tobytes().decode().splitlines()
    return book_of((word for line in lines for word in json.loads(line)), "words_held")


def read_batch(embeddings: Any, labels: Any, call: str, *, sets: bool = False) -> tuple[Tensor, Labels]:
    """Read a batch as (items, dim) embeddings and one label for each, on the devices where they are; see `as_labels`.

    Raises:
        ValueError: If shapes or types do not fit.
    """
    embeddings = as_tensor(embeddings, "embeddings", call)
    if embeddings.ndim != 2:
        raise ValueError(
            f"{call} needs embeddings of shape (items, dim); got shape {tuple(embeddings.shape)}. Flatten what belongs to "
            "one item: embeddings.flatten(1)."
        )
    return embeddings, labels_of_each(labels, len(embeddings), "labels", "embeddings", call, sets=sets)


def refuse_another_form(call: str, form: str, labels: Labels) -> None:
    """Refuse a batch of integers where words were given before, zeros and ones of other labels, and so on.

    Raises:
        ValueError: With both forms.
    """
    if len(labels) and form != labels.form:
        raise ValueError(
            f"{call}: the labels so far are {form}, those of this batch {labels.form}. Pass the same kind in every batch."
        )


def refuse_another_dim(call: str, dim: int, embeddings: Tensor) -> None:
    """Refuse a batch of other dimension than those before.

    Raises:
        ValueError: With both.
    """
    if embeddings.shape[1] != dim:
        raise ValueError(
            f"{call}: the embeddings so far have dimension {dim}, those of this batch {embeddings.shape[1]}. Every batch "
            "must come from the same layer."
        )


def refuse_other_codes(call: str, codes: Int[Tensor, "_"], book: CodeBook) -> None:
    """Refuse labels of which some are in the code book, and others are not: those of a process that was given integers.

    Raises:
        ValueError: If there are any.
    """
    if not bool(torch.isin(codes.cpu(), torch.tensor(list(book), device="cpu")).all()):
        raise ValueError(f"{call}: some labels are words, others integers. Pass the same kind in every process.")
