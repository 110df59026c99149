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
    """Logs how well classes are separated: the discriminant ratio J and the variance ratio of batches and sets.

    It logs these keys. A test logs the keys of validation with `test/`. Higher is better for every key.

    - `train/J`: scatter between classes over scatter within classes, of one training batch
    - `train/variance_ratio`: variance between classes over variance within classes, of one training batch
    - `val/J`, `val/variance_ratio`: the same of the whole set
    - `val/variance_ratio_low`, `val/variance_ratio_high`: 95 % interval of the variance ratio

    J = Tr(S_B) / Tr(S_W), at least 0. A J of 0 means that all classes have the same mean. A J of 1 means that class
    means are as far apart as items of one class are. J depends on the numbers of classes and items: for pure noise it
    is (k - 1) / (n - k) with k classes and n items. So compare J only between batches, or sets, of the same
    composition.

    The variance ratio does not have this dependence: you can compare it between batches, sets and runs. For pure noise
    its expected value is 0, and it can be slightly negative.

    J is NaN if each class has one item or if all embeddings are equal. The ratio is NaN if there is one class, if each
    class has one item, or if all items of each class are equal. Warnings report this. A warning also reports that most
    classes of the first batch have one item.

    `train/J` is the value of the first process's batch; `val/J` covers all processes. Training batches are measured on
    their device without waiting for it. With `EmbeddingSource(ids=...)` each item of a set counts once, and its
    embeddings are kept on the CPU until the end of the set. Without ids only sums are kept. A training batch counts
    each row, as the loss does.

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
        >>> items = torch.tensor([[-2.0], [2.0], [4.0], [8.0], [10.0], [14.0]])
        >>> loader = DataLoader(TensorDataset(items, torch.tensor([0, 0, 1, 1, 2, 2])), batch_size=3)
        >>> monitor = DiscriminantRatioMonitor(source="encoder")
        >>> options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        >>> trainer = Trainer(callbacks=[monitor], accelerator="cpu", **options)
        >>> _ = trainer.validate(Model(), loader, verbose=False)
        >>> {key: round(trainer.callback_metrics[key].item(), 4) for key in ("val/J", "val/variance_ratio")}
        {'val/J': 6.0, 'val/variance_ratio': 4.0}

    Args:
        source: Where embeddings come from: the name of a submodule, such as `"encoder"`, whose output is the embedding;
            two keys of the mapping that the step returns (default `("embeddings", "labels")`); a function of (outputs,
            batch) that returns (embeddings, labels); or an `EmbeddingSource`, which also names labels and ids. Monitors
            with equal sources share one copy of the embeddings.
        every_n_steps: Measure one training batch in this number, at least 1. Choose a divisor of the Trainer's
            `log_every_n_steps`; otherwise loggers get older values. None measures only validation and test, for
            training batches without labels.
        normalize: Scale each embedding to length 1 first, so that J describes angles.
        skip_singletons: Leave out classes with a single item in the batch.
        eps: Fraction of the total scatter that is added to the scatter within classes. J is at most 1 / eps.
        prog_bar: Show J of training batches in the progress bar. Lightning waits for the device whenever it refreshes
            the bar.
        loaders: Index or name of the loader that is measured, or several of them, such as `("retrieval",)` if the steps
            of another loader give no embeddings. By default all loaders are measured. With only one measured loader,
            its name is not part of the keys.
        strict: Which errors end the run. None: only a mistake in the settings or in the output of a step does, if
            possible in the sanity check. Any other error, such as NaN in one batch, becomes a warning, and the values
            are NaN. True: every error ends the run. False: none does.

    Raises:
        ValueError: If `every_n_steps` is below 1, or the source has an unknown form.
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
            # Sums do not record their items, so a repeated item could not be left out.
            keeps_items=EmbeddingSource.of(source, type(self).__name__).ids is not None,
        )
        self.normalize = normalize
        self.skip_singletons = skip_singletons
        self.eps = eps
        self._shows_training = prog_bar
        # number of measured batches of this epoch
        self._measured_batches = 0
        # numbers of measured batches without J and without a variance ratio, on the device of the embeddings
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
            both = f", and train/variance_ratio in {without_ratio}" if without_ratio else ""
            self._policy.warn(
                f"train/J was NaN in {without_j} of {self._measured_batches} batches{both}. In these batches each class "
                "had one item, all embeddings were equal (collapsed), or some were not finite. J compares items of the "
                "same class: draw several items of each class, for instance with a ClassBalancedBatchSampler or an "
                "EpisodicBatchSampler. (Shown once.)",
                kind="batches without J",
            )
        elif without_ratio:
            self._policy.warn(
                f"train/variance_ratio was NaN in {without_ratio} of {self._measured_batches} batches. In these "
                "batches there was one class, or the items of each class were equal. Draw several classes, for instance "
                "with a ClassBalancedBatchSampler or an EpisodicBatchSampler. (Shown once.)",
                kind="batches without a ratio",
            )

    def _warn_of_singletons(self, labels: Tensor) -> None:
        """Warn if most classes of a batch have one item, but not all of them. Waits for the device of the labels."""
        counts = labels.unique(return_counts=True)[1]
        singletons = int((counts == 1).sum())
        # If all classes have one item, both values are NaN, and the warning at the end of the epoch reports it.
        if len(counts) > singletons > len(counts) / 2:
            self._policy.warn(
                f"{singletons} of the {len(counts)} classes of the first measured batch have one item. train/J then "
                "depends on how the batch was drawn, more than on the embedding, so do not compare it with val/J. Use "
                "train/variance_ratio, or draw several items of each class, for instance with a "
                "ClassBalancedBatchSampler or an EpisodicBatchSampler. (Shown once.)",
                kind="singletons",
            )

    # ---------------------------------------------------------------------------------------------- validation and test

    def _see_batch(self, trainer: Trainer, loader: int, read: Batch, batch: Any) -> None:
        """Check a batch, and without ids merge its moments into the moments of its loader."""
        # Two encoders, missing labels and regression targets are errors, which are raised at the end of the epoch.
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
                f"{read.first + int(bad_rows[0])}. Look for a diverged loss, a division by a zero norm, or a float16 "
                "overflow."
            )
        if not self._member.keeps_items:
            self._add(loader, read, embeddings)

    def _add(self, loader: int, read: Batch, embeddings: Tensor) -> None:
        """Merge the moments of a batch into its loader's moments, without the padding of a `DistributedSampler`."""
        labels = on_cpu(read.labels)
        dataloader = self._collection.dataloader(loader)
        replica = self._collection.replica
        batches = self._collection.batches[loader]
        if unknown_order_reason(dataloader, batches, read.first + read.items, replica) is None:
            # The sampler repeats items at the end of a pass to give all ranks the same number.
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
                self._policy.warn(f"{key}, {low} and {high} are NaN. {ratio.undefined} (Shown once.)", kind=key)
            elif ratio.interval_undefined is not None:
                self._policy.warn(f"{low} and {high} are NaN. {ratio.interval_undefined} (Shown once.)", kind=low)
        return values

    def _moments_here(self, trainer: Trainer, side: Side) -> ClassMoments | None:
        """Return the moments of this process's items, without repeated items; None without items. *Collective*."""
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
