"""Base class of the monitors that also measure single training batches."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fewshot_callbacks.callbacks._collecting import CollectingMonitor
from fewshot_callbacks.callbacks._embedder import Embedder
from fewshot_callbacks.callbacks._embedding_reader import TRAINING_STEP, EmbeddingReader
from fewshot_callbacks.callbacks._evaluation import Loaders
from fewshot_callbacks.callbacks._watched_keys import Better
from fewshot_callbacks.callbacks.embedding_source import EmbeddingSource, Source
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import Labels
from fewshot_callbacks.settings import NoFile
from fewshot_callbacks.trainer.lightning import LightningModule, Trainer


class BatchMonitor(CollectingMonitor):
    """Measures one training batch in `every_n_steps`, and the set of each loader of a validation or test.

    A subclass also sets `_training_keys` and `_better`, and implements `_measure_batch`.

    Args:
        every_n_steps: Measure one training batch in this number; None measures no training batch.
    """

    # keys of the values of a training batch
    _training_keys: tuple[str, ...]
    # whether the progress bar shows the first of them
    _shows_training = False

    _remedy_for_two = "Keep one of them."
    _remedy_for_logged_twice = ""

    def __init__(
        self,
        source: EmbeddingSource | Source | NoFile,
        *,
        every_n_steps: int | None,
        loaders: Loaders | None,
        strict: bool | None,
        needs_labels: bool,
        keeps_items: bool,
    ) -> None:
        super().__init__(source, loaders=loaders, strict=strict, needs_labels=needs_labels, keeps_items=keeps_items)
        owner = self._policy.owner
        call = f"{owner}(every_n_steps="
        if every_n_steps is not None and every_n_steps < 1:
            raise InputError(f"{call}{every_n_steps}) must be at least 1. None measures only validation and test.")
        self.every_n_steps = every_n_steps
        self._training_reader = EmbeddingReader(self.source, owner, needs_labels=needs_labels)
        self._training_reader.without_training = (
            f" If training steps have none, {call}None) measures only validation and test."
        )
        self._training_embedder = Embedder(self._training_reader)

    @abstractmethod
    def _measure_batch(self, embeddings: Tensor, labels: Labels) -> tuple[Tensor | float, ...]:
        """Return the values of a training batch, in the order of `_training_keys`."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run: forget the previous run."""
        super().setup(trainer, pl_module, stage)
        self._training_reader.begin()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the hooks to the submodule that embeddings come from."""
        super().on_fit_start(trainer, pl_module)
        self._training_reader.attach(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: Any) -> None:
        """Remove the hooks, and drop the collected items."""
        super().teardown(trainer, pl_module, stage)
        self._training_reader.detach()

    on_exception = teardown

    def _measures_batch(self, trainer: Trainer) -> bool:
        """Return whether the current training batch is measured."""
        # Counted from 1 over all epochs, as for Lightning's `log_every_n_steps`: with the same number for both, a logger
        # writes each value at its own batch.
        batch_number = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        return self.every_n_steps is not None and batch_number % self.every_n_steps == 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start to capture the submodule's output, if this batch is measured."""
        if self._measures_batch(trainer):
            self._training_reader.start_capture()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Mark the end of the step. A closure may run it again, with other weights."""
        # Manual optimisation calls this inside the step.
        if pl_module.automatic_optimization:
            self._training_reader.capture.end_run()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Mark the end of the step: later embeddings of this batch have other weights."""
        self._training_reader.capture.end_run()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure this batch, and log the values."""
        if not self._measures_batch(trainer):
            return
        keys = self._training_keys
        values: tuple[Tensor | float, ...] = (math.nan,) * len(keys)
        with self._policy.handling(f"{' and '.join(keys)} are NaN."):
            values = self._measure_batch(*self._read_training_batch(trainer, outputs, batch))
        for key, value in zip(keys, values, strict=True):
            # Even without a bar, `prog_bar=True` makes Lightning read the value, and so wait for the device.
            in_progress_bar = self._shows_training and key == keys[0] and trainer.progress_bar_callback is not None
            pl_module.log(key, value, on_step=True, on_epoch=False, prog_bar=in_progress_bar, batch_size=1)

    def _read_training_batch(self, trainer: Trainer, outputs: Any, batch: Any) -> tuple[Tensor, Labels]:
        """Return embeddings and labels of the step, or of the batch if the source embeds batches."""
        if not self.source.embeds_batches:
            return self._training_reader.read(outputs, batch, TRAINING_STEP)
        self._training_reader.stop_capture()
        return self._training_embedder.in_evaluation(trainer, trainer.lightning_module, batch)

    def _keys_of_training(self) -> Mapping[str, Better]:
        return {key: self._better.get(key.removeprefix("train/")) for key in self._training_keys}
