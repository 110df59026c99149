"""The training classes that a monitor looks at, and how their items become embeddings outside any step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from fewshot_callbacks._trainer import evaluating
from fewshot_callbacks.callbacks.embeddings import STEP_KEYS, EmbeddingReader
from fewshot_callbacks.functional._checks import LABEL_DTYPES
from fewshot_callbacks.functional.similarity import Similarity
from fewshot_callbacks.functional.subsets import class_subset
from fewshot_callbacks.metrics.embedding_store import process_count

TrainingData = Dataset[Any] | DataLoader[Any] | Callable[[Trainer], Any]
"""A data set, a loader of one, or a function of the Trainer that returns either."""

Embed = str | Callable[[LightningModule, Any], Tensor | tuple[Tensor, Tensor]]
"""How a batch becomes embeddings outside a step: the name of a submodule that is called with the batch's inputs, or a
function of (module, batch) that returns embeddings, or (embeddings, labels)."""

MOVED = 0.01
"""Two embeddings of one item further apart than this, relative to their length, were not made in the same way."""


class TrainingClasses:
    """Some items of some training classes, always the same.

    Args:
        data: the training set as it is served in an evaluation; by default the Trainer's data module is asked for it.
        labels: of its items; by default its attribute `labels` or `targets`.
        classes: how many.
        items_per_class: of each.
        seed: of the draw.
        owner: name of the callback, for messages.
    """

    def __init__(
        self,
        data: TrainingData | None,
        labels: Tensor | Sequence[int] | None,
        classes: int | None,
        items_per_class: int | None,
        seed: int,
        owner: str,
    ) -> None:
        self.data, self.labels, self.owner = data, labels, owner
        self.classes, self.items_per_class, self.seed = classes, items_per_class, seed
        self.items = 0
        """on all ranks; known once there is a loader"""

    def loader(self, trainer: Trainer) -> DataLoader[Any]:
        """This rank's share of the items: the i-th of all goes to rank i modulo their number.

        Raises:
            ValueError: if the training set or its labels are not known.
        """
        data = self._found(trainer)
        given = data if isinstance(data, DataLoader) else None
        dataset = data if given is None else given.dataset
        chosen = class_subset(self._labels_of(dataset), self.classes, self.items_per_class, self.seed)
        self.items = len(chosen)
        options: dict[str, Any] = {"batch_size": 64}
        if given is not None:
            options = {name: getattr(given, name) for name in ("num_workers", "collate_fn", "pin_memory")}
            options["batch_size"] = given.batch_size or 64
        return DataLoader(Subset(dataset, chosen[trainer.global_rank :: process_count()].tolist()), **options)

    def _found(self, trainer: Trainer) -> Any:
        data = self.data
        if data is None:
            data_module = getattr(trainer, "datamodule", None)
            data = getattr(data_module, "training_data_for_evaluation", None)
            if data is None:
                raise ValueError(
                    f"{self.owner} does not know the training set: pass training_data=..., your training set "
                    "with the transforms of an evaluation, or give your data module a method training_data_for_evaluation() "
                    "that returns it."
                )
            data = data()
        elif callable(data) and not isinstance(data, Dataset | DataLoader):
            data = data(trainer)
        if not isinstance(data, DataLoader) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise ValueError(
                f"{self.owner}: training_data gave a {type(data).__name__}; a data set with a length and items, "
                "or a DataLoader of one, is wanted."
            )
        return data

    def _labels_of(self, dataset: Any) -> Tensor:
        labels = self.labels
        if labels is None:
            labels = getattr(dataset, "labels", None)
        if labels is None:
            labels = getattr(dataset, "targets", None)
        if labels is None:
            raise ValueError(
                f"{self.owner}: {type(dataset).__name__} has neither labels nor targets, by which classes could be drawn "
                " without reading every item. Pass training_labels=..., the label of each item."
            )
        labels = torch.as_tensor(labels)
        if labels.shape != (len(dataset),) or labels.dtype not in LABEL_DTYPES:
            raise ValueError(
                f"{self.owner}: the training labels are {labels.dtype} of shape {tuple(labels.shape)}; one "
                f"integer for each of the {len(dataset)} items is wanted."
            )
        return labels


class Embedder:
    """Makes embeddings of a batch that no step sees.

    Args:
        embed: see `Embed`; by default the submodule that the reader's source names, or else the module itself.
        reader: knows where labels are in a batch.
        owner: name of the callback, for messages.
    """

    def __init__(self, embed: Embed | None, reader: EmbeddingReader, owner: str) -> None:
        self.embed = reader.source if embed is None and isinstance(reader.source, str) else embed
        self.reader, self.owner = reader, owner

    def __call__(self, trainer: Trainer, module: LightningModule, batch: Any) -> tuple[Tensor, Tensor]:
        """Embeddings and labels of a batch that has arrived on the device."""
        with trainer.precision_plugin.val_step_context():
            if callable(self.embed):
                result = self.embed(module, batch)
            else:
                result = (module if self.embed is None else module.get_submodule(self.embed))(
                    _inputs(batch, self.owner)
                )
        key = self.reader.source[0] if isinstance(self.reader.source, tuple) else STEP_KEYS[0]
        if isinstance(result, Mapping) and key in result:
            result = result[key]
        if isinstance(result, tuple) and len(result) == 2:
            return self.reader.checked(*result, "embed")
        return self.reader.checked(result, self.reader.labels_of(batch, "embed"), "embed")

    def check(
        self, trainer: Trainer, module: LightningModule, batch: Any, given: Tensor, similarity: Similarity
    ) -> None:
        """See that a validation step made the embeddings of a batch in the same way.

        Args:
            trainer: runs the validation.
            module: the module.
            batch: what the step was given.
            given: the embeddings that the step gave.
            similarity: what is compared; cosine does not see the length of an embedding.

        Raises:
            ValueError: if they differ by more than rounding does.
        """
        with evaluating(module):
            own, _ = self(trainer, module, batch)
        how = f"{type(module).__name__}.forward" if self.embed is None else f"The submodule {self.embed!r}"
        how = "The function given as embed" if callable(self.embed) else how
        fix = "Pass embed=..., a function of (module, batch) that gives the embeddings of validation_step."
        if own.shape != given.shape:
            raise ValueError(
                f"{self.owner}: {how} gives embeddings of shape {tuple(own.shape)} for a batch of which "
                f"validation_step gave {tuple(given.shape)}. {fix}"
            )
        one, other = own.double(), given.double()
        if similarity == "cosine":  # which does not see the length
            one, other = (torch.nn.functional.normalize(part, dim=1) for part in (one, other))
        moved = float(((one - other).norm(dim=1) / other.norm(dim=1).clamp(min=1e-30)).max()) if len(one) else 0.0
        if moved > MOVED:
            raise ValueError(
                f"{self.owner}: {how} gives other embeddings than validation_step for the same batch (they lie "
                f"up to {moved:.2g} of their length apart), so a gap would mean nothing. {fix}"
            )


def _inputs(batch: Any, owner: str) -> Any:
    """What a model is called with: the first part of a batch, or of a mapping its only entry besides the labels."""
    if isinstance(batch, Mapping):
        rest = [key for key in batch if key not in ("labels", "label", "targets", "target", "y")]
        if len(rest) == 1:
            return batch[rest[0]]
        raise ValueError(
            f"{owner}: the batch is a mapping with the keys {', '.join(map(repr, batch))}, and which of them "
            "the model is called with is not known. Pass embed=lambda module, batch: module(batch['...'])."
        )
    return batch[0] if isinstance(batch, Sequence) and not isinstance(batch, str) else batch
