"""`Monitor`: a question of your own to the embeddings of each validation and test."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fewshot_callbacks.callbacks._collecting import CollectingMonitor
from fewshot_callbacks.callbacks._evaluation import Loaders, stage_of
from fewshot_callbacks.callbacks._sides import MeasuredSet
from fewshot_callbacks.callbacks._viewers import ItemSet, Label, whole_set
from fewshot_callbacks.callbacks._watched_keys import Better
from fewshot_callbacks.callbacks.embedding_source import STEP_KEYS, EmbeddingSource, Entry, Source
from fewshot_callbacks.distributed.torch_distributed import all_processes, broadcast_object
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import no_labels
from fewshot_callbacks.settings import NoFile
from fewshot_callbacks.system.words import with_article
from fewshot_callbacks.trainer.lightning import Trainer
from fewshot_callbacks.trainer.loaders import evaluation_loaders


@dataclass(frozen=True, eq=False)
class EmbeddedSet:
    """A whole set: the items of all processes in the order of the data set, each once.

    Nobody may keep its tensors: other monitors of the Trainer share them.
    """

    queries: ItemSet
    """its items; with a gallery those that search in it"""
    gallery: ItemSet | None
    """the items that are searched; None where each item is a query against all others"""
    stage: str
    """`val` or `test`"""
    suffix: str
    """end of the keys of its values; empty for a single loader"""
    epoch: int
    """epoch of the training"""

    @property
    def embeddings(self) -> Tensor:
        """(items, dim) embeddings of the queries on the CPU, in the dtype of the model."""
        return self.queries.embeddings

    @property
    def labels(self) -> Sequence[Label]:
        """The label of each query, an integer or a string; a tuple of columns where items have several labels."""
        return self.queries.labels

    @property
    def ids(self) -> Sequence[int | str] | None:
        """The id of each query; None if the source has no `ids`."""
        return self.queries.ids


class Monitor(CollectingMonitor):
    """Base of your own monitors: one question to the embeddings of each validation and test.

    Implement `measure`. It is only called on the first process, with the items of all processes, and its values are
    sent to the others: every process logs the same, and checkpoints and early stopping may monitor them. Attributes
    that it sets exist on the first process. `strict` decides how an error in it is handled. Monitors with equal sources
    share one copy of the embeddings.

    Args:
        source: See `RetrievalMonitor`.
        gallery: See there.
        loaders: See there.
        name: See there.
        prog_bar: Show the first of the values in the progress bar.
        strict: See `RetrievalMonitor`.

    Raises:
        ValueError: If the source is of no known form, or `name` is empty.

    Examples:
        >>> import torch
        >>> class MeanLength(Monitor):
        ...     names = ("mean_length",)
        ...     def measure(self, items):
        ...         return {"mean_length": items.embeddings.norm(dim=1).mean()}
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[MeanLength(source="encoder")], logger=False, accelerator="cpu")
    """

    names: Sequence[str] = ()
    """names of the values, known before the first success: they are NaN after an error, and checkpoints may wait for them"""
    better: Mapping[str, Better] = {}
    """name -> `"higher"` or `"lower"`: a checkpoint whose mode says otherwise is a warning"""

    _takes_label_sets = True
    _takes_two_encoders = True

    def __init__(
        self,
        *,
        source: EmbeddingSource | Source | NoFile = STEP_KEYS,
        gallery: int | Entry | None = None,
        loaders: Loaders | None = None,
        name: str | None = None,
        prog_bar: bool = False,
        strict: bool | None = None,
    ) -> None:
        super().__init__(
            source,
            gallery=gallery,
            loaders=loaders,
            name=name,
            prog_bar=prog_bar,
            strict=strict,
            needs_labels=False,
            takes_targets=True,
        )
        self._better = self.better
        # names of the values of the latest success
        self._latest_names: Sequence[str] = ()

    @abstractmethod
    def measure(self, items: EmbeddedSet) -> Mapping[str, Any]:
        """Return name -> value, a number or a tensor of one, for a set; only called on the first process."""

    def _names(self) -> Sequence[str]:
        return self.names or self._latest_names

    def _names_of_set(self, trainer: Trainer, set_name: str, measured_set: MeasuredSet) -> Sequence[str]:
        """Return the names that are known; none before the first success if the class declares none. *Collective*."""
        return self.names or self._latest_names

    def _measure_set(self, trainer: Trainer, set_name: str, measured_set: MeasuredSet) -> Mapping[str, float]:
        """Call `measure` on the first process, and return its values. *Collective*."""
        loaders = list(evaluation_loaders(trainer).items())
        sides: list[ItemSet | None] = []
        for side in measured_set.sides:
            loader_name, loader = loaders[side.loader]
            shard = self._shard(side)
            if not self._collection.have_labels(side.loader):
                shard = shard._replace(labels=no_labels())
            sides.append(whole_set(shard, loader_name, loader, all_processes()))
        values = None
        queries = sides[0]
        if queries is not None:
            gallery = sides[1] if len(sides) > 1 else None
            suffix = measured_set.suffix
            items = EmbeddedSet(queries, gallery, stage_of(trainer), suffix, trainer.current_epoch)
            values = self._as_numbers(self.measure(items))
        result = broadcast_object(values)
        assert result is not None
        self._latest_names = tuple(result)
        undefined = [name for name, value in result.items() if math.isnan(value)]
        if undefined:
            owner = self._policy.owner
            note = f"{', '.join(undefined)} are NaN, as {owner}.measure returned them. To say why, raise a ValueError there."
            self._tell([note], set_name)
        return result

    def _as_numbers(self, values: Any) -> dict[str, float]:
        """Return the values of `measure` as numbers.

        Raises:
            ValueError: If it is not a mapping of names to numbers, or lacks a name that the class declares.
        """
        owner = type(self).__name__
        if not isinstance(values, Mapping):
            raise InputError(
                f"{owner}.measure returned {with_article(type(values).__name__)}. Return name -> number: {{'silhouette': "
                "0.4}."
            )
        missing = [name for name in self.names if name not in values]
        if missing:
            raise InputError(
                f"{owner}.measure returned no {missing[0]!r}, which its names declare. Return NaN where it is undefined."
            )
        numbers: dict[str, float] = {}
        for name, value in values.items():
            try:
                numbers[str(name)] = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise InputError(
                    f"{owner}.measure returned {with_article(type(value).__name__)} for {name!r}, which is no single "
                    f"number: {error}"
                ) from error
        return numbers
