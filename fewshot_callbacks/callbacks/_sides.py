"""The sides of an evaluation: which items of a validation are queries, and which are in the gallery."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewshot_callbacks.callbacks._batch_entries import are_zeros_and_ones, read_entry
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.callbacks._embedding_reader import EmbeddingReader
from fewshot_callbacks.callbacks._evaluation import Loaders, ends_of_loaders, loader_index, no_such_loader, suffixes
from fewshot_callbacks.callbacks.embedding_source import STEP_KEYS, Entry
from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.functional._labels import Labels
from fewshot_callbacks.trainer.lightning import Trainer

LabelledEmbeddings = tuple[Tensor, Labels]


# `gallery` names a loader or a flag, which is known only once there are loaders.
FLAG = "gallery"
# the argument that names attributes
SLICES = "slices"


class Column(NamedTuple):
    """A value that is read for each item, in addition to its embedding, label and id."""

    argument: str
    """the monitor's argument: `groups`, `slices`, `ids`, or `gallery` for a flag"""
    entry: Any
    """where it is: an entry, or several that together make one value"""


class Side(NamedTuple):
    """Names one side of an evaluation, queries or gallery: items from one loader."""

    loader: int
    """index of the loader"""
    encoder: int = 0
    """0, or 1 for the embeddings of the second encoder"""
    flag: Column | None = None
    """the flag that divides the items into queries and gallery; None for all items"""
    is_flagged: bool = False
    """whether these are the gallery items of the flag"""

    @property
    def undivided(self) -> Side:
        """The side with the items of both values of the flag."""
        return Side(self.loader, self.encoder)


class MeasuredSet(NamedTuple):
    """A set that is measured: its place in the logged keys, its queries and its gallery."""

    direction: str
    """direction of two encoders, such as `image_to_text`; empty for one encoder"""
    suffix: str
    """end of its keys"""
    sides: list[Side]
    """queries and gallery; one side if the queries search each other"""


def gallery_flag(trainer: Trainer, gallery: int | Entry | None) -> Column | None:
    """Return the column that flags gallery items; None if the gallery has a loader, or does not exist."""
    is_loader = isinstance(gallery, int) or loader_index(trainer, gallery) is not None
    return None if gallery is None or is_loader else Column(FLAG, gallery)


def gallery_loader(trainer: Trainer, gallery: int | Entry | None) -> int | None:
    """Return the index of the gallery's loader; None without one."""
    return loader_index(trainer, gallery) if len(suffixes(trainer)) > 1 else None


def sets_of(
    trainer: Trainer, gallery: int | Entry | None, loaders: Loaders | None, directions: tuple[str, str] | None
) -> list[MeasuredSet]:
    """Return the sets that are evaluated: one for each loader of queries, or two for each with two encoders."""
    ends = ends_of_loaders(trainer, loaders)
    loader_of_gallery = gallery_loader(trainer, gallery)
    query_loaders = [loader for loader in ends if loader != loader_of_gallery]
    flag = gallery_flag(trainer, gallery)
    has_one_side = loader_of_gallery is None and flag is None
    sets: list[MeasuredSet] = []
    for loader in query_loaders:
        suffix = ends[loader]
        if directions is not None:
            forward, backward = directions
            encoders = [Side(loader, encoder=0), Side(loader, encoder=1)]
            sets.append(MeasuredSet(forward, suffix, encoders))
            sets.append(MeasuredSet(backward, suffix, encoders[::-1]))
            continue
        queries = Side(loader, flag=flag)
        candidates = queries._replace(is_flagged=True) if loader_of_gallery is None else Side(loader_of_gallery)
        if loader_of_gallery is not None and len(query_loaders) == 1:
            suffix = ""
        sets.append(MeasuredSet("", suffix, [queries] if has_one_side else [queries, candidates]))
    return sets


def check_gallery(
    trainer: Trainer, gallery: int | Entry | None, loaders: Loaders | None, owner: str, *, two_encoders: bool
) -> None:
    """Check that `gallery` is an entry of batches, or names a loader while another loader has queries."""
    call = f"{owner}(gallery={gallery!r})"
    index = loader_index(trainer, gallery)
    if two_encoders and gallery is not None:
        raise UsageError(f"{call}: with two encoders, each side is the gallery of the other. Leave out gallery.")
    if index is None and isinstance(gallery, int):
        raise UsageError(no_such_loader(trainer, call))
    if index is not None and len(suffixes(trainer)) > 1 and not sets_of(trainer, gallery, loaders, None):
        raise UsageError(f"{call}, loaders={loaders!r}: there are no queries. Name a loader of queries in loaders.")
    if index is not None and len(suffixes(trainer)) < 2:
        raise UsageError(
            f"{call}: there is only one loader, so there are no queries. Return two loaders, or leave out gallery, "
            "so that each item searches all others."
        )


def directions_of(keys: tuple[str, str]) -> tuple[str, str]:
    """Return the two directions of two encoders.

    Examples:
        >>> directions_of(("image_embeds", "text_embeds"))
        ('image_to_text', 'text_to_image')
    """
    first, second = (re.sub(r"_(emb|embeds?|embeddings?|features?)$", "", key) for key in keys)
    return f"{first}_to_{second}", f"{second}_to_{first}"


def read_two_encoders(
    reader: EmbeddingReader, outputs: Any, batch: Any, step: str, first: int
) -> list[LabelledEmbeddings] | None:
    """Return the embeddings and labels of two encoders; None unless both keys of the source have embeddings.

    `first` is the index of the batch's first item in this process's pass.
    """
    if not (isinstance(reader.source.source, tuple) and isinstance(outputs, Mapping)):
        return None
    first_key, second_key = reader.keys
    outputs_of_encoders = (outputs.get(first_key), outputs.get(second_key))
    embeddings = [rows for rows in outputs_of_encoders if isinstance(rows, Tensor)]
    if len(embeddings) < 2 or not all(rows.ndim == 2 and rows.is_floating_point() for rows in embeddings):
        return None
    # Zeros and ones are multi-label targets.
    if embeddings[0].shape[1] != embeddings[1].shape[1] or are_zeros_and_ones(embeddings[1]):
        return None
    reader.stop_capture()
    labels = _labels_of_two_encoders(reader, [len(rows) for rows in embeddings], outputs, batch, step, first)
    return [reader.check(rows, row_labels, step) for rows, row_labels in zip(embeddings, labels, strict=True)]


def _labels_of_two_encoders(
    reader: EmbeddingReader, counts: Sequence[int], outputs: Mapping[str, Any], batch: Any, step: str, first: int
) -> list[Any]:
    """Return labels that match the rows of both sides; `counts` are their numbers of rows."""
    labels: Any = reader.source.labels
    if isinstance(labels, tuple):
        return [read_entry("labels", entry, outputs, batch, reader.owner) for entry in labels]
    if labels is not None:
        return [reader.find_labels(None, batch, step)] * 2
    if STEP_KEYS[1] in outputs:
        return [outputs[STEP_KEYS[1]]] * 2
    if counts[0] != counts[1]:
        fix = reader.source.as_argument(labels=("image_id", "image_of_caption"))
        raise UsageError(
            f"{reader.owner}, {reader.source.but_for()}: {step} gave {counts[0]} and {counts[1]} embeddings. "
            f"Name labels that match them: {fix}, an entry for each side."
        )
    # Row i of one side matches row i of the other: each pair gets a label that is unique over all processes.
    positions = torch.arange(first, first + counts[0], device="cpu")
    processes = all_processes()
    return [Labels(positions * processes.count + processes.rank)] * 2
