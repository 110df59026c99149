"""J and the variance ratio of every training batch, and of the whole validation set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fewshot_callbacks.callbacks._collection import Batch
from fewshot_callbacks.callbacks._evaluation import Loaders
from fewshot_callbacks.callbacks._sides import MeasuredSet, Side
from fewshot_callbacks.callbacks._training_batches import BatchMonitor
from fewshot_callbacks.callbacks.embedding_source import STEP_KEYS, EmbeddingSource, Source
from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import Labels, on_cpu
from fewshot_callbacks.functional._reading import non_finite_rows
from fewshot_callbacks.functional.discriminant_ratio import (
    EPS,
    ClassMoments,
    batch_ratios,
    moments_of_set,
    ratio_of_set,
)
from fewshot_callbacks.functional.variance_ratio import variance_ratio_of_set
from fewshot_callbacks.metrics.item_batch import refuse_another_form
from fewshot_callbacks.settings import NoFile
from fewshot_callbacks.system.words import counted, verb
from fewshot_callbacks.trainer.lightning import LightningModule, Trainer
from fewshot_callbacks.trainer.loaders import unknown_order_reason


class DiscriminantRatioMonitor(BatchMonitor):
    """Logs the discriminant ratio J (scatter between classes over scatter within them) while a model trains.

    `train/J` is J of every n-th training batch. It is computed on the device of the embeddings without waiting for the
    device (Lightning's progress bar waits when it reads a value to show). `val/J` and `test/J` are J of the whole set
    over all ranks; with several ranks, `train/J` is J of rank 0's batch. All values are logged through
    `LightningModule.log`, so that loggers, checkpoints and progress bars receive them. J is at least 0, larger means
    better separated classes, and it is NaN where it is undefined.

    J depends on the numbers of items and classes. The variance ratio, from the same sums, can be compared between
    batches and sets; it is logged as `train/variance_ratio` and `val/variance_ratio` (see
    `fewshot_callbacks.variance_ratio`), for sets with the ends of its 95 % interval, `val/variance_ratio_low` and
    `..._high`. The labels of the first measured batch of a fit are read at once, and a warning is given if most of its
    classes have a single item.

    With `EmbeddingSource(ids=...)` each item of a validation or test counts once, however often and on whichever process
    it comes; its embeddings are then kept on the CPU until the end of the set. Without ids only sums are kept. `train/J`
    counts each row of a batch, as the loss does.

    Args:
        source: Where embeddings come from: two keys of the mapping that the step returns (default
            `("embeddings", "labels")`), the name of a submodule whose output is the embedding, or a function of
            (outputs, batch) that returns (embeddings, labels); or an `EmbeddingSource`, which also says where the labels
            and the ids of items are, and what to do if the steps give no embeddings. Several monitors can share it.
        every_n_steps: Measure one training batch in this number, at least 1. Between measurements, progress bar and
            loggers keep the latest value: choose a divisor of the Trainer's `log_every_n_steps`, so that loggers write
            fresh values. None measures validation and test alone, for training batches without labels.
        normalize: Scale each embedding to length 1 first, which changes J.
        skip_singletons: Leave out classes with a single item in the batch.
        eps: Share of the total scatter that is added to the scatter within classes; J is at most 1 / eps.
        prog_bar: Show J of training batches in the progress bar. Lightning reads the value, and so waits for the device,
            whenever it refreshes the bar.
        loaders: Index or name of the loader that is measured, or several, such as `("retrieval",)` where the steps of
            another loader give no embeddings. By default all are measured. The keys of a single one have no ending.
        strict: Which errors end the run. None: a mistake in the settings or in what a step returns (no embeddings, no
            such loader) ends the run, at the sanity check if there is one; an error that may pass, such as a diverged
            batch, is a warning, once in a run, and the values are NaN. True: every error ends the run. False: no error
            does.

    Raises:
        ValueError: If `every_n_steps` is below 1, or the source is of no known form.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[DiscriminantRatioMonitor(every_n_steps=10)], logger=False, accelerator="cpu")
    """

    _training_keys = "train/J", "train/variance_ratio"
    _better = dict.fromkeys(("J", "variance_ratio", "variance_ratio_low", "variance_ratio_high"), "higher")

    def __init__(
        self,
        *,
        source: EmbeddingSource | Source | NoFile = STEP_KEYS,
        every_n_steps: int | None = 1,
        normalize: bool = False,
        skip_singletons: bool = False,
        eps: float = EPS,
        prog_bar: bool = True,
        loaders: Loaders | None = None,
        strict: bool | None = None,
    ) -> None:
        super().__init__(
            source,
            every_n_steps=every_n_steps,
            loaders=loaders,
            strict=strict,
            needs_labels=True,
            # Sums do not record their items, so that a repeated item could not be left out.
            keeps_items=EmbeddingSource.of(source, type(self).__name__).ids is not None,
        )
        self.normalize = normalize
        self.skip_singletons = skip_singletons
        self.eps = eps
        self._shows_training = prog_bar
        # number of measured batches of this epoch
        self._measured_batches = 0
        # number of measured batches without J and without a variance ratio, on the device of the embeddings
        self._batches_without_j: Tensor | int = 0
        self._batches_without_ratio: Tensor | int = 0

    # ------------------------------------------------------------------------------------------------------------ training

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the counts of the epoch."""
        self._measured_batches = 0
        self._batches_without_j = 0
        self._batches_without_ratio = 0

    def _measure_batch(self, embeddings: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
        """Return J and the variance ratio of a training batch, on the device of the embeddings."""
        codes = labels.codes.to(embeddings.device, non_blocking=True)
        j, ratio = batch_ratios(
            embeddings, codes, eps=self.eps, normalize=self.normalize, skip_singletons=self.skip_singletons
        )
        self._measured_batches += 1
        # The device counts: reading the values here would wait for it at every batch.
        self._batches_without_j = j.isnan() + self._batches_without_j
        self._batches_without_ratio = ratio.isnan() + self._batches_without_ratio
        if self._policy.is_new("first batch"):
            # The check runs once, since it waits for the device.
            self._warn_of_singletons(labels.codes)
        return j, ratio

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn once if J or the variance ratio was undefined."""
        without_j = int(self._batches_without_j)
        without_ratio = int(self._batches_without_ratio)
        if without_j:
            both = f" So was train/variance_ratio in {without_ratio}." if without_ratio else ""
            self._policy.warn(
                f"train/J was NaN in {without_j} of {self._measured_batches} batches: each class had one item, all "
                f"embeddings were equal (collapsed), or some were not finite.{both} J compares items of the same class: "
                "draw several items of each class, for instance with an EpisodicBatchSampler. (Shown once.)",
                kind="batches without J",
            )
        elif without_ratio:
            self._policy.warn(
                f"train/variance_ratio was NaN in {without_ratio} of {self._measured_batches} batches: there was a single "
                "class, or the items of each class were equal. Draw several classes, for instance with an "
                "EpisodicBatchSampler. (Shown once.)",
                kind="batches without a ratio",
            )

    def _warn_of_singletons(self, labels: Tensor) -> None:
        """Warn if most classes of a batch have one item. Waits for the device of the labels."""
        counts = labels.unique(return_counts=True)[1]
        singletons = int((counts == 1).sum())
        if 2 * singletons > len(counts):
            self._policy.warn(
                f"{singletons} of the {len(counts)} classes of the first measured batch have one item: train/J then "
                f"depends on how the batch was drawn rather than on the embedding, and cannot be compared with val/J. "
                f"Use train/variance_ratio, which can be compared if some class has two items, or draw several items "
                f"of each class, for instance with an EpisodicBatchSampler. (Shown once.)",
                kind="singletons",
            )

    # ---------------------------------------------------------------------------------------------- validation and test

    def _see_batch(self, trainer: Trainer, loader: int, read: Batch, batch: Any) -> None:
        """Check a batch, and merge its moments into the moments of its loader. With ids, the collection keeps the items."""
        # Two encoders, missing labels and targets of a regression are errors that are raised at the end of the epoch.
        if read.embeddings is None or len(read.labels) != read.items or read.labels.are_targets:
            return
        # Another process of a tensor-parallel group counts the same items.
        if not self._collection.replica.is_first:
            return
        refuse_another_form(self._policy.owner, self._label_forms.setdefault(loader, read.labels.form), read.labels)
        embeddings = read.embeddings.cpu()
        bad_rows = non_finite_rows(embeddings)
        if len(bad_rows):
            raise InputError(
                f"{self._policy.owner}: {len(bad_rows)} of the {counted(len(embeddings), 'embedding')} of a batch "
                f"{verb(len(bad_rows), 'is', 'are')} not finite (NaN or Inf), the first at item "
                f"{read.first + int(bad_rows[0])}. Find the step that made them: a diverged loss, a division by a zero "
                "norm, float16 overflow."
            )
        if not self._member.keeps_items:
            self._add(loader, read, embeddings)

    def _add(self, loader: int, read: Batch, embeddings: Tensor) -> None:
        """Merge the moments of a batch into its loader's, without items that a `DistributedSampler` repeats."""
        labels = on_cpu(read.labels)
        dataloader = self._collection.dataloader(loader)
        replica = self._collection.replica
        batches = self._collection.batches[loader]
        if unknown_order_reason(dataloader, batches, read.first + read.items, replica) is None:
            # The sampler repeats items at the end of a pass, to give all ranks the same number.
            items_of_rank = len(range(replica.number, len(dataloader.sampler.dataset), replica.replicas))
            not_repeated = slice(max(0, items_of_rank - read.first))
            embeddings = embeddings[not_repeated]
            labels = labels[not_repeated]
        moments = moments_of_set(embeddings, labels, normalize=self.normalize)
        if moments is None:
            return
        if loader in self._moments:
            moments = self._moments[loader].merge(moments)
        self._moments[loader] = moments

    def _names(self) -> Sequence[str]:
        return ("J", "variance_ratio", "variance_ratio_low", "variance_ratio_high")

    def _measure_set(self, trainer: Trainer, set_name: str, measured_set: MeasuredSet) -> Mapping[str, float]:
        """Return J, the variance ratio and the ends of its interval over all processes, by name. *Collective*."""
        [side] = measured_set.sides
        values: dict[str, float] = dict.fromkeys(self._names(), torch.nan)
        values["J"], scatter = ratio_of_set(
            self._moments_here(trainer, side), all_processes(), eps=self.eps, skip_singletons=self.skip_singletons
        )
        # Without J there is no scatter, and a warning has reported it.
        if scatter is not None:
            ratio = variance_ratio_of_set(scatter)
            values["variance_ratio"] = ratio.value
            values["variance_ratio_low"], values["variance_ratio_high"] = ratio.interval
            stage = "test" if trainer.testing else "val"
            key, low, high = (self._key(stage, name) + measured_set.suffix for name in self._names()[1:])
            if ratio.undefined is not None:
                self._policy.warn(f"{key} is NaN. {ratio.undefined} So are {low} and {high}. (Shown once.)", kind=key)
            elif ratio.interval_undefined is not None:
                self._policy.warn(f"{low} and {high} are NaN. {ratio.interval_undefined} (Shown once.)", kind=low)
        return values

    def _moments_here(self, trainer: Trainer, side: Side) -> ClassMoments | None:
        """Return the moments of the items of this process, each item of all processes once; None if empty. *Collective*."""
        if not self._member.keeps_items:
            self._warn_of_repeats(side)
            return self._moments.get(side.loader)
        shard = self._shard(side)
        return moments_of_set(shard.embeddings, shard.labels, normalize=self.normalize)

    def _clear(self) -> None:
        super()._clear()
        # moments of each loader of this process
        self._moments: dict[int, ClassMoments] = {}
        # form of the labels of each loader, see `Labels.form`
        self._label_forms: dict[int, str] = {}
