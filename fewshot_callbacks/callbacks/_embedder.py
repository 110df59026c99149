"""How a batch becomes embeddings outside any step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from fewshot_callbacks._trainer import evaluating
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.callbacks.embeddings import EmbeddingReader, check_submodule, follow, hooks_ignored
from fewshot_callbacks.functional._reading import Labels
from fewshot_callbacks.functional.retrieval import Similarity

# How a batch becomes embeddings outside a step: the name of a submodule that is called with the batch's inputs, if need
# be with a path in its output (`"encoder:pooler_output"`), or a function of (module, batch) that returns embeddings, or
# (embeddings, labels).
Embed = str | Callable[[LightningModule, Any], Tensor | tuple[Tensor, Any]]

# Two embeddings of one item further apart than this, relative to their length, were not made in the same way.
MOVED = 0.01


class Embedder:
    """Makes embeddings of a batch that no step sees.

    Args:
        embed: See `Embed`; by default the submodule that the reader's source names, or else the module itself.
        reader: Finds the labels in a batch.
        owner: Name of the callback, for messages.
    """

    def __init__(self, embed: Embed | None, reader: EmbeddingReader, owner: str) -> None:
        self.embed = reader.source if embed is None and isinstance(reader.source, str) else embed
        self.reader, self.owner = reader, owner

    def __call__(self, trainer: Trainer, module: LightningModule, batch: Any) -> tuple[Tensor, Labels]:
        """Embed a batch that has arrived on the device, and read its labels."""
        # In the precision of a step, whose embeddings these are compared with.
        with trainer.precision_plugin.val_step_context():
            result: Any = self.embed(module, batch) if callable(self.embed) else self._called(module, batch)
        key = self.reader.keys[0]
        # A forward method or a function may return what the step returns.
        if isinstance(result, Mapping) and key in result:
            result = result[key]
        if isinstance(result, tuple) and len(result) == 2:
            return self.reader.checked(*result, "embed")
        return self.reader.checked(result, self.reader.labels_of(None, batch, "embed"), "embed")

    def in_evaluation(self, trainer: Trainer, module: LightningModule, batch: Any) -> tuple[Tensor, Labels]:
        """Embed a batch in evaluation mode, beside the step: callbacks that listen to a submodule do not hear it."""
        with hooks_ignored(), evaluating(module):
            return self(trainer, module, batch)

    def _called(self, module: LightningModule, batch: Any) -> Any:
        inputs = _inputs(batch, self.owner)
        if self.embed is not None:
            name, _, path = str(self.embed).partition(":")
            return follow(module.get_submodule(name)(inputs), path, f"{self.owner}(embed={self.embed!r})")
        try:
            return module(inputs)
        # PyTorch raises it where a module has no `forward`; one that a module raises itself says something else.
        except NotImplementedError as error:
            if "forward" not in str(error):
                raise
            raise UsageError(
                f"{self.owner}: {type(module).__name__} has no forward method, and embed is not given. Pass "
                "embed='name.of.a.submodule', or a function of (module, batch) that returns the embeddings."
            ) from error

    def check_name(self, module: LightningModule) -> None:
        """See that there is the submodule that is named.

        Raises:
            ValueError: If not; with the names that are near.
        """
        if isinstance(self.embed, str):
            check_submodule(module, self.embed.partition(":")[0], f"{self.owner}(embed={self.embed!r})")

    def check(
        self, trainer: Trainer, module: LightningModule, batch: Any, given: Tensor, similarity: Similarity
    ) -> None:
        """See that a validation step made the embeddings of a batch in the same way.

        Args:
            trainer: Runs the validation.
            module: The module.
            batch: What the step was given.
            given: The embeddings that the step gave.
            similarity: What is compared; cosine does not see the length of an embedding.

        Raises:
            ValueError: If they differ by more than rounding does.
        """
        own, _ = self.in_evaluation(trainer, module, batch)
        one, other = own.double(), given.double()
        if similarity == "cosine":  # which does not see the length
            one, other = (torch.nn.functional.normalize(part, dim=1) for part in (one, other))
        self.compare(one, other, module, "validation_step", "comparing the two would mean nothing")

    def compare(self, own: Tensor, given: Tensor, module: LightningModule, step: str, consequence: str) -> None:
        """See that two embeddings of the same items were made in the same way.

        Args:
            own: What this embedder made.
            given: What the step gave.
            module: The module, for messages.
            step: Name of the step.
            consequence: What follows if they were not.

        Raises:
            ValueError: If they differ by more than rounding does.
        """
        how = f"{type(module).__name__}.forward" if self.embed is None else f"The submodule {self.embed!r}"
        how = "The function given as embed" if callable(self.embed) else how
        fix = f"Pass embed=..., a function of (module, batch) that gives the embeddings of {step}."
        if own.shape != given.shape:
            raise UsageError(
                f"{self.owner}: {how} gives embeddings of shape {tuple(own.shape)} for a batch of which "
                f"{step} gave {tuple(given.shape)}. {fix}"
            )
        own, given = own.double(), given.double()
        # The bound keeps a row of zeros from dividing by zero.
        moved = float(((own - given).norm(dim=1) / given.norm(dim=1).clamp(min=1e-30)).max()) if len(own) else 0.0
        if moved > MOVED:
            raise UsageError(
                f"{self.owner}: {how} gives other embeddings than {step} for the same batch (they differ by up to "
                f"{moved:.2g} of their length), so {consequence}. {fix}"
            )


def _inputs(batch: Any, owner: str) -> Any:
    """Find the inputs of the model: the first part of a batch, or of a mapping its only entry besides the labels."""
    if isinstance(batch, Mapping):
        rest = [key for key in batch if key not in ("labels", "label", "targets", "target", "y")]
        if len(rest) == 1:
            return batch[rest[0]]
        raise UsageError(
            f"{owner}: the batch is a mapping with the keys {', '.join(map(repr, batch))}, and it is not known with "
            f"which of them the model is called. Pass embed=lambda module, batch: module(batch['...'])."
        )
    return batch[0] if isinstance(batch, Sequence) and not isinstance(batch, str) else batch
