"""`Monitor`: the base class of your own monitors."""

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

    Do not keep its tensors after `measure`, because other monitors share them.

    Attributes:
        queries: Its items; with a gallery, the items that search it.
        gallery: The items that are searched; None if each item is a query against all others.
        stage: `val` or `test`.
        suffix: End of the logged keys; empty for a single loader.
        epoch: Epoch of the run.
    """

    queries: ItemSet
    gallery: ItemSet | None
    stage: str
    suffix: str
    epoch: int

    @property
    def embeddings(self) -> Tensor:
        """Embeddings of the queries, (items, dim), on the CPU, in the dtype of the model."""
        return self.queries.embeddings

    @property
    def labels(self) -> Sequence[Label]:
        """Label of each query: an integer, a string, or a tuple of columns for several labels."""
        return self.queries.labels

    @property
    def ids(self) -> Sequence[int | str] | None:
        """Id of each query; None if the source has no `ids`."""
        return self.queries.ids


class Monitor(CollectingMonitor):
    """Base class of your own monitors, which compute values from the embeddings of each validation and test.

    Implement `measure`. It runs only on the first process, with the items of all processes. All processes then log its
    values, so checkpoints and early stopping can monitor them. Attributes that `measure` sets exist only on the first
    process. Monitors with equal sources share one copy of the embeddings.

    Examples:
        >>> import torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.encoder = torch.nn.Identity()
        ...     def validation_step(self, batch, batch_idx):
        ...         self.encoder(batch[0])
        >>> class MeanLength(Monitor):
        ...     names = ("mean_length",)
        ...     def measure(self, items):
        ...         return {"mean_length": items.embeddings.norm(dim=1).mean()}
        >>> items = torch.tensor([[3.0, 4.0], [6.0, 8.0]])
        >>> loader = DataLoader(TensorDataset(items, torch.tensor([0, 1])), batch_size=2)
        >>> monitor = MeanLength(source="encoder")
        >>> options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        >>> trainer = Trainer(callbacks=[monitor], accelerator="cpu", **options)
        >>> _ = trainer.validate(Model(), loader, verbose=False)
        >>> trainer.callback_metrics["val/mean_length"].item()
        7.5

    Args:
        source: Where embeddings come from: the name of a submodule, such as `"encoder"`, whose output is the embedding;
            two keys of the mapping that the step returns (default `("embeddings", "labels")`); a function of (outputs,
            batch) that returns (embeddings, labels); or an `EmbeddingSource`, which also names labels and ids. Monitors
            with equal sources share one copy of the embeddings.
        gallery: Index or name of the loader with the gallery. If no loader has that name: an entry of the step's output
            or of the batch, or a function of (outputs, batch), with a boolean for each item that is True for gallery
            items.
        loaders: Index or name of the loader that is measured, or several of them, such as `("retrieval",)` if the steps
            of another loader give no embeddings. By default all loaders are measured. With only one measured loader,
            its name is not part of the keys.
        name: Part of the keys between the stage and the value: `t2i` gives `val/t2i/mean_length`. Several monitors of
            this kind in one Trainer need different names.
        prog_bar: Show the first of the values in the progress bar.
        strict: Which errors end the run. None: only a mistake in the settings or in the output of a step does, if
            possible in the sanity check. Any other error, such as NaN in one batch, becomes a warning, and the values
            are NaN. True: every error ends the run. False: none does.

    Attributes:
        names: Names of the values. They are logged as NaN after an error, and checkpoints can monitor them before the
            first success.
        better: name -> `"higher"` or `"lower"`. A checkpoint with the wrong `mode` gives a warning.

    Raises:
        ValueError: If the source has an unknown form, or `name` is empty.
    """

    names: Sequence[str] = ()
    better: Mapping[str, Better] = {}

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
        """Return name -> value, a number or a tensor with one element. Called only on the first process."""

    def _names(self) -> Sequence[str]:
        return self.names or self._latest_names

    def _names_of_set(self, trainer: Trainer, set_name: str, measured_set: MeasuredSet) -> Sequence[str]:
        """Return the declared names, or the names of the latest success. *Collective*."""
        return self.names or self._latest_names

    def _measure_set(self, trainer: Trainer, set_name: str, measured_set: MeasuredSet) -> Mapping[str, float]:
        """Return the values of `measure`, which runs only on the first process. *Collective*."""
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
            note = (
                f"{owner}.measure returned NaN for {', '.join(undefined)}. To give a reason, raise a ValueError there."
            )
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
                f"{owner}.measure did not return {missing[0]!r}, one of its names. Return NaN if it is undefined."
            )
        numbers: dict[str, float] = {}
        for name, value in values.items():
            try:
                numbers[str(name)] = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise InputError(
                    f"{owner}.measure returned {with_article(type(value).__name__)} for {name!r}; expected a single "
                    f"number: {error}"
                ) from error
        return numbers
