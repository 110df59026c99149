"""J of every training batch, and of the whole validation set."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from fewshot_callbacks._trainer import dealt_items, evaluation_loaders, items_of_batches
from fewshot_callbacks.callbacks._evaluation import EvaluationMonitor, suffixes
from fewshot_callbacks.callbacks.embeddings import STEP_KEYS, EmbeddingSource, LabelSource, Source
from fewshot_callbacks.functional._checks import check_labels, non_finite_rows
from fewshot_callbacks.functional.discriminant_ratio import EPS, ClassMoments, discriminant_ratio, unit_rows
from fewshot_callbacks.metrics.processes import all_processes, process_count


class DiscriminantRatioMonitor(EvaluationMonitor):
    """Logs the discriminant ratio J (scatter between classes over scatter within them) while a model trains.

    `train/J` is J of the batch, for every n-th batch; it is computed on the device of the embeddings without waiting
    for it (Lightning's progress bar reads what it shows, and waits then). `val/J` and `test/J` are J of the whole set,
    all ranks together. Both go through `LightningModule.log`, so that every logger, checkpoint and progress bar gets
    them. On several ranks `train/J` is that of rank 0's batch.

    Args:
        source: where embeddings come from: two keys of the mapping that the step returns (default
            `("embeddings", "labels")`), the name of a submodule whose output is the embedding, or a function of
            (outputs, batch) that returns (embeddings, labels); or an `EmbeddingSource`, which several monitors can share.
        labels: where labels are in the batch, if not where the step returned them: key, position or function.
        every_n_steps: measure every so many training batches, at least 1. In between the latest value stands, also in
            a logger: let it divide the Trainer's `log_every_n_steps`, so that what is written has just been measured.
        normalize: scale each embedding to length 1 first, which changes J.
        skip_singletons: leave out classes with a single item in the batch.
        eps: share of the total scatter that is added to the scatter within classes; J is at most 1 / eps.
        prog_bar: show J in the progress bar.
        strict: what an error does. None: a mistake in the settings or in what a step returns (no embeddings, no such loader)
            ends the run, at the sanity check if there is one; what may heal, such as a diverged batch, is a warning, once in
            a run, and the values are NaN. True: any error ends the run. False: none does.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[DiscriminantRatioMonitor(every_n_steps=10)], logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        *,
        source: Source | EmbeddingSource = STEP_KEYS,
        labels: LabelSource | None = None,
        every_n_steps: int = 1,
        normalize: bool = False,
        skip_singletons: bool = False,
        eps: float = EPS,
        prog_bar: bool = True,
        strict: bool | None = None,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"DiscriminantRatioMonitor(every_n_steps={every_n_steps}) must be at least 1.")
        super().__init__(source, labels, strict)
        self.every_n_steps, self.normalize, self.skip_singletons = every_n_steps, normalize, skip_singletons
        self.eps, self.prog_bar = eps, prog_bar
        self._measured = 0
        self._undefined: Tensor | None = None  # how many batches of this epoch J said nothing of; on their device
        self._forget()

    # ------------------------------------------------------------------------------------------------------------ training

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Get ready."""
        super().setup(trainer, pl_module, stage)
        self._trainer = trainer

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count."""
        self._measured, self._undefined = 0, None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Expect embeddings where this batch is to be measured."""
        if self._is_due(trainer):
            self._reader.expect()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log J of this batch."""
        if not self._is_due(trainer):
            return
        value: Tensor | float = torch.nan
        items = 1
        try:
            embeddings, labels = self._reader.read(outputs, batch, "training_step")
            items = len(labels)
            value = discriminant_ratio(
                embeddings,
                labels.to(embeddings.device, non_blocking=True),
                eps=self.eps,
                normalize=self.normalize,
                skip_singletons=self.skip_singletons,
            )
            self._measured += 1
            undefined = value.isnan()
            self._undefined = undefined.long() if self._undefined is None else self._undefined + undefined
        except Exception as error:  # a metric must not end a training
            self._policy.handle(error, "train/J is NaN.")
        pl_module.log("train/J", value, on_step=True, on_epoch=False, prog_bar=self.prog_bar, batch_size=items)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say once if J was undefined."""
        undefined = 0 if self._undefined is None else int(self._undefined)
        if undefined:
            self._policy.say(
                f"train/J was NaN in {undefined} of {self._measured} batches: each class had one item, all embeddings "
                "were equal (collapsed), or some were not finite. J compares items of one class: draw several of each, "
                "for instance with an EpisodicBatchSampler. (Said once.)",
                kind="undefined batches",
            )

    def _is_due(self, trainer: Trainer) -> bool:
        # The batch that runs, counted from 1 over all epochs, as Lightning counts for `log_every_n_steps`: with the same
        # number for both, what a logger writes is J of the batch it writes it for.
        return (trainer.fit_loop.epoch_loop.total_batch_idx + 1) % self.every_n_steps == 0

    # ---------------------------------------------------------------------------------------------- validation and test

    def _collect(
        self, loader: int, embeddings: Tensor, labels: Tensor, positions: range, outputs: Any, batch: Any
    ) -> None:
        labels = check_labels(labels, len(embeddings), "labels", "embeddings", self._policy.owner)
        embeddings = embeddings.cpu()
        bad = non_finite_rows(embeddings)
        if len(bad):
            raise ValueError(
                f"{len(bad)} of the {len(embeddings)} embeddings of a batch are not finite (NaN or Inf), the first at item "
                f"{positions.start + int(bad[0])}. Find the step that made them: a diverged loss, a division by a zero "
                "norm, float16 overflow."
            )
        if self.normalize:
            embeddings = unit_rows(embeddings.double())
        dataloader = list(evaluation_loaders(self._trainer).values())[loader]
        dealt = dealt_items(dataloader)
        if dealt is not None and items_of_batches(dataloader, self._batches[loader]) == positions.stop:
            # leave out what a DistributedSampler repeats, to even out the ranks, at the end
            mine = len(range(self._trainer.global_rank, dealt, process_count()))
            fresh = slice(max(0, mine - positions.start))
            embeddings, labels = embeddings[fresh], labels[fresh]
        moments = ClassMoments.of(embeddings, labels)
        self._moments[loader] = self._moments[loader].merge(moments) if loader in self._moments else moments

    def _measure(self, trainer: Trainer, pl_module: LightningModule, stage: str, failed: dict[int, Exception]) -> None:
        for loader, suffix in enumerate(suffixes(trainer)):
            key, value = f"{stage}/J{suffix}", torch.nan
            if loader in failed:
                self._policy.handle(failed[loader], f"{key} is NaN.")
            else:
                self._dealt(trainer, loader)
                try:
                    value = self._ratio(self._moments.get(loader))
                except Exception as error:  # a metric must not end a training
                    self._policy.handle(error, f"{key} is NaN.")
            self._log(pl_module, key, value)

    def _ratio(self, mine: ClassMoments | None) -> float:
        """J of the items of all processes.

        Raises:
            ValueError: where it says nothing, with the reason.
        """
        processes = all_processes()
        with processes.together():
            dims = [dim for dim in processes.gather(None if mine is None else mine.means.shape[1]) if dim is not None]
            if not dims:
                raise ValueError("The set is empty: no step gave an embedding.")
            moments = (ClassMoments.nothing(dims[0]) if mine is None else mine).shared(processes)
            value = float(
                moments.discriminant_ratio(eps=self.eps, skip_singletons=self.skip_singletons, processes=processes)
            )
            most = processes.largest([float(moments.counts.max()) if len(moments.counts) else 0.0])[0]
            classes = sum(processes.gather(len(moments.counts)))
        if not classes:
            raise ValueError("The set is empty: no step gave an embedding.")
        if math.isnan(value):
            raise ValueError(
                f"Each of the {classes} classes has one item. J compares items of one class: validate on a set with several "
                "of each."
                if most == 1
                else "All embeddings are equal: the model has collapsed."
            )
        return value

    def _forget(self) -> None:
        self._moments: dict[int, ClassMoments] = {}
