"""Embeds batches outside a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fewshot_callbacks.callbacks._batch_entries import LABEL_NAMES
from fewshot_callbacks.callbacks._capture import hooks_ignored
from fewshot_callbacks.callbacks._conduct import UsageError, describe
from fewshot_callbacks.callbacks._embedding_reader import EmbeddingReader, check_submodule
from fewshot_callbacks.callbacks.embedding_source import Code, Embed, EmbeddingSource, follow
from fewshot_callbacks.functional._labels import Labels
from fewshot_callbacks.functional.retrieval import Similarity
from fewshot_callbacks.trainer.lightning import LightningModule, Trainer
from fewshot_callbacks.trainer.side_effects import evaluation_mode

# If two embeddings of one item have a larger relative distance, they were computed differently.
LARGEST_DIFFERENCE = 0.01


class Embedder:
    """Embeds a batch outside a step.

    It uses `embed` of its source, else the submodule of its source, else the module itself.
    """

    def __init__(self, reader: EmbeddingReader) -> None:
        source = reader.source.source
        self.embed: Embed | None = reader.source.embed
        if self.embed is None and isinstance(source, str):
            self.embed = source
        self.reader = reader

    @property
    def owner(self) -> str:
        """Name of the callback, for messages."""
        return self.reader.owner

    def __call__(self, trainer: Trainer, module: LightningModule, batch: Any) -> tuple[Tensor, Labels]:
        """Return the embeddings and labels of a batch that is on the device."""
        # The precision of a step, because these embeddings are compared with a step's embeddings.
        with trainer.precision_plugin.val_step_context():
            result: Any = self.embed(module, batch) if callable(self.embed) else self._call_submodule(module, batch)
        key = self.reader.keys[0]
        # `forward` or the function may return the same mapping as the step.
        if isinstance(result, Mapping) and key in result:
            result = result[key]
        if isinstance(result, tuple) and len(result) == 2:
            return self.reader.check(*result, "embed")
        return self.reader.check(result, self.reader.find_labels(None, batch, "embed"), "embed")

    def in_evaluation(self, trainer: Trainer, module: LightningModule, batch: Any) -> tuple[Tensor, Labels]:
        """Return embeddings and labels in evaluation mode. Hooks of `EmbeddingReader`s ignore these calls."""
        with hooks_ignored(), evaluation_mode(module):
            return self(trainer, module, batch)

    def _call_submodule(self, module: LightningModule, batch: Any) -> Any:
        """Return the output for a batch, of the submodule that `embed` names or of the module."""
        inputs, place = self._find_inputs(batch)
        if self.embed is not None:
            name, _, path = str(self.embed).partition(":")
            output = self._call(module.get_submodule(name), name, inputs, place)
            try:
                return follow(output, path)
            except UsageError as error:
                raise UsageError(f"{self.owner}, {self._call_of_source()}: {error}") from None
        try:
            return self._call(module, "", inputs, place)
        except NotImplementedError as error:
            # PyTorch's error for a module without `forward` contains this word; other errors come from the module.
            if "forward" not in str(error):
                raise
            raise UsageError(
                f"{self.owner}: {type(module).__name__} has no forward method, and the source does not name an embed. "
                f"Pass {self.reader.source.as_argument(embed='name.of.a.submodule')}, or as embed a function of (module, "
                "batch) that returns the embeddings."
            ) from error

    def _call(self, module: nn.Module, name: str, inputs: Any, place: str) -> Any:
        """Return the output of a module; `place` is where the inputs are in the batch."""
        try:
            return module(inputs)
        except (AttributeError, TypeError) as error:
            if not isinstance(inputs, list | tuple):
                raise
            call = f"embed={name!r}" if name else f"{type(module).__name__}.forward"
            raise UsageError(
                f"{self.owner}: {call} does not take a list, but the inputs are {describe(inputs)}, such as views of each "
                f"item. Choose one: {self._with_function(place + '[0]')}. ({type(error).__name__}: {error})"
            ) from error

    def _find_inputs(self, batch: Any) -> tuple[Any, str]:
        """Return the inputs of the model, and the code that finds them in the batch.

        They are the first part of a batch, or the only entry of a mapping in addition to the labels.
        """
        if isinstance(batch, Mapping):
            input_keys = [key for key in batch if key not in LABEL_NAMES]
            if len(input_keys) == 1:
                return batch[input_keys[0]], f"batch[{input_keys[0]!r}]"
            tensors = [key for key in input_keys if isinstance(batch[key], Tensor) and batch[key].ndim > 1]
            key = next(iter([*tensors, *input_keys]), "...")
            raise UsageError(
                f"{self.owner}: the batch is a mapping with the keys {', '.join(map(repr, batch))}, and it is unknown "
                f"which of them are the inputs of the model. Pass them: {self._with_function(f'batch[{key!r}]')}."
            )
        if isinstance(batch, Sequence) and not isinstance(batch, str):
            return batch[0], "batch[0]"
        return batch, "batch"

    def _with_function(self, inputs: str) -> str:
        """Return the code of the source with a function that embeds these inputs as before."""
        source = self.reader.source
        called = EmbeddingSource(self.embed).call_on(inputs) if isinstance(self.embed, str) else source.call_on(inputs)
        return source.as_argument(embed=Code(f"lambda module, batch: {called}"))

    def check_name(self, module: LightningModule) -> None:
        """Check that the module has the submodule that `embed` names."""
        if isinstance(self.embed, str):
            check_submodule(module, self.embed.partition(":")[0], f"{self.owner}, {self._call_of_source()}")

    def _call_of_source(self) -> str:
        """Return the source as a call, for messages."""
        return self.reader.source.but_for()

    def check(
        self, trainer: Trainer, module: LightningModule, batch: Any, step_embeddings: Tensor, similarity: Similarity
    ) -> None:
        """Check that this embedder and a validation step make the same embeddings of a batch."""
        embeddings, _ = self.in_evaluation(trainer, module, batch)
        if similarity == "cosine":
            embeddings = torch.nn.functional.normalize(embeddings.double(), dim=1)
            step_embeddings = torch.nn.functional.normalize(step_embeddings.double(), dim=1)
        self.compare(embeddings, step_embeddings, module, "validation_step", "a comparison would be meaningless")

    def compare(
        self, embeddings: Tensor, step_embeddings: Tensor, module: LightningModule, step: str, consequence: str
    ) -> None:
        """Check that this embedder and a step have made the same embeddings of a batch."""
        if self.embed is None:
            subject = f"{type(module).__name__}.forward"
        elif callable(self.embed):
            subject = "The function given as embed"
        else:
            subject = f"The submodule {self.embed!r}"
        fix = (
            f"Pass embed=... in its EmbeddingSource, a function of (module, batch) that gives the embeddings of {step}."
        )
        if embeddings.shape != step_embeddings.shape:
            raise UsageError(
                f"{self.owner}: {subject} gives embeddings of shape {tuple(embeddings.shape)}, but for the same batch "
                f"{step} gave shape {tuple(step_embeddings.shape)}. {fix}"
            )
        if not len(embeddings):
            return
        distances = (embeddings.double() - step_embeddings.double()).norm(dim=1)
        # The bound avoids a division by zero.
        lengths = step_embeddings.double().norm(dim=1).clamp(min=1e-30)
        difference = float((distances / lengths).max())
        if difference > LARGEST_DIFFERENCE:
            raise UsageError(
                f"{self.owner}: {subject} and {step} give different embeddings for the same batch (by up to "
                f"{difference:.2g} of their length), so {consequence}. {fix}"
            )
