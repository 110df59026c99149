"""Prototypical networks as a LightningModule that trains on episodes and evaluates on a fixed list of episodes."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import labels_of_each
from fewshot_callbacks.functional._reading import non_finite_rows, refuse_non_finite
from fewshot_callbacks.functional.episode_accuracy import EpisodeAccuracy
from fewshot_callbacks.functional.episodes import EpisodeProtocol, sample_episodes
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore
from fewshot_callbacks.protonet.backbones import checked_embeddings, make_backbone
from fewshot_callbacks.protonet.classifiers import SupportClassifier
from fewshot_callbacks.protonet.evaluation import (
    batch_norm_of_the_batch,
    batch_norms,
    episode_accuracy,
    evaluate_episodes,
    logged_values,
    score_batch,
    summarize_batches,
)
from fewshot_callbacks.protonet.heads import (
    DistanceRatioHead,
    HeadName,
    Representation,
    check_representation,
    make_head,
)
from fewshot_callbacks.trainer.lightning import LightningModule, rank_zero_info
from fewshot_callbacks.trainer.loaders import Replica, evaluation_loaders, replica_of, unpadded_length
from fewshot_callbacks.trainer.side_effects import evaluation_mode
from fewshot_callbacks.trainer.warning import warn, warn_of_other_package

# Above this ln rho, rho is infinite in float32.
MAX_LOG_RHO = math.log(torch.finfo(torch.float32).max)
# Steps between two checks of rho on an accelerator; each check waits for the accelerator.
ACCELERATOR_INTERVAL = 50


class ExponentWatch:
    """Raises an error if rho becomes infinite or NaN.

    A check waits for an accelerator, so the values of 50 steps are checked together; the error still names the step.

    Args:
        interval: Steps between two checks; by default 1 on a CPU and 50 on an accelerator.
    """

    def __init__(self, interval: int | None = None) -> None:
        self.interval = interval
        # Steps and their ln rho since the last check.
        self._recorded: list[tuple[int, Tensor]] = []
        # The last step with a finite rho, and that rho.
        self._last_finite: tuple[int, float] | None = None

    def see(self, step: int, head: nn.Module, *, wait: bool = False) -> None:
        """Record rho before a step, and check the recorded values if a check is due.

        `wait` checks at once, before a checkpoint or at the end of a run. A head without an exponent is ignored.
        """
        if not isinstance(head, DistanceRatioHead):
            return
        # A copy, because the optimiser writes the next value into the same tensor.
        self._recorded.append((step, head.log_rho.detach().clone()))
        interval = self.interval
        if not interval:
            interval = 1 if head.log_rho.device.type == "cpu" else ACCELERATOR_INTERVAL
        if wait or len(self._recorded) >= interval:
            self._look()

    def _look(self) -> None:
        recorded = self._recorded
        self._recorded = []
        log_rhos = torch.stack([log_rho for _, log_rho in recorded]).tolist()  # this waits for the device
        for (step, _), log_rho in zip(recorded, log_rhos, strict=True):
            rho = math.exp(log_rho) if log_rho <= MAX_LOG_RHO else log_rho * math.inf  # infinity, or NaN for NaN
            if not (math.isfinite(rho) and math.isfinite(log_rho)):
                raise InputError(
                    f"rho of the distance-ratio head became {rho} at step {step} (ln rho = {log_rho:.4g}); "
                    f"{self._last_finite_in_words()}. Training has diverged: lower the learning rate, clip the gradients "
                    "(Trainer(gradient_clip_val=1.0)), or look for images that are not finite. Earlier checkpoints are not "
                    "affected."
                )
            self._last_finite = (step, rho)

    def _last_finite_in_words(self) -> str:
        if self._last_finite is None:
            return "it was never finite"
        step, rho = self._last_finite
        return f"its last finite value was {rho:.4g}, at step {step}"


StepOutput = dict[str, Any] | None
# The protocol of the papers: 600 episodes, 5-way 1-shot with 15 queries per class.
DEFAULT_PROTOCOL = EpisodeProtocol()


class ProtoNet(LightningModule):
    """Prototypical network: it compares a query with the mean of each class's support embeddings.

    A training batch `(images, labels)` is one episode, as `EpisodicBatchSampler` draws it, or `episodes_per_batch`
    consecutive episodes. The rows of an episode may be in any order.

    An evaluation batch is any batch `(images, labels)`. Each image is embedded once, in evaluation mode. At the end of
    the epoch, a seeded list of episodes is drawn from the embeddings; this gives exactly the result of a forward pass
    per episode. The list refers to images by their position in the loader, so it is the same in every epoch if the
    loader does not shuffle.

    These values are logged:

    - In training: `train/loss` (mean cross-entropy of the queries, in nats), `train/accuracy` in [0, 1], and
      `train/rho` with the distance-ratio head.
    - In validation, and with `test/` in a test: `val/accuracy` in [0, 1], `val/accuracy_std` over episodes,
      `val/accuracy_ci95` (half-width of the 95 % interval over other episodes of these classes) and `val/accuracy_ci95_open`
      (the same over other classes). They are the same on every rank. With several loaders, each key ends in
      `/dataloader_idx_0` and so on.

    A message reports the evaluated episodes once in a run, and again if they change: their number, sizes and hash, and
    whether batch statistics were used. `evaluation_results` contains this information, too.

    The values are NaN, with one warning that gives the reason, if the episodes cannot be drawn: a class has too few images,
    `limit_val_batches` or `fast_dev_run` cuts the run, embeddings are not finite, or labels are strings in some batches and
    integers in others. Nothing is evaluated in Lightning's sanity check.

    Args:
        backbone: Network from images to embeddings: `"conv4"`, `"resnet18"`, or a module that returns (images, dim).
        head: Mapping from distances to logits: `"dr"` for the distance-ratio head, `"softmax"` for the head of prototypical
            networks, or a module `(query, prototypes) -> logits`, such as `DistanceRatioHead(distance="angular")`.
        in_channels: Channels of the images, for a backbone given by name.
        shots: Support images per class in a training episode, at least 1.
        representation: `"mean"` represents a class by the mean of its support, `"nearest"` by its support point that is
            nearest to the query. See `class_logits`.
        episodes_per_batch: Number of episodes per training batch, at least 1, all of equal size. The loss is the mean over
            all queries. Batch norm normalises all episodes together.
        learning_rate: Learning rate of Adam, positive.
        evaluation: The validation and test episodes; also a mapping with the same fields, as in checkpoints.
        val_episodes: Number of validation episodes; by default the number of test episodes.
        batch_statistics: Whether batch norm uses the statistics of the episode in evaluation. The prediction for a
            query then depends on the other queries: this transductive setting gives higher accuracies, so
            `evaluation_results` contains
            the flag. Running statistics are neither used nor changed.
        evaluation_batches: `"images"` if evaluation batches contain any images; `"episodes"` if each evaluation batch is one
            episode of the sizes in `evaluation`, as `EpisodicBatchSampler(..., fixed=True)` draws it.

    Attributes:
        evaluation_results: The latest `EpisodeAccuracy` of `"val"` and `"test"`; with several loaders, of
            `"val/dataloader_idx_0"` and so on. There is no entry if the latest evaluation failed.

    Raises:
        ValueError: A number is too small, a name is unknown, or `batch_statistics` has no meaning: with
            `evaluation_batches="images"`, or with a backbone without batch norm. Training raises it if rho becomes
            infinite or NaN; the message names the step and the last finite value.

    Note: If you pass a backbone or head as a module, the checkpoint contains its weights but not its construction: pass it
    again, `ProtoNet.load_from_checkpoint(path, backbone=MyBackbone())`. If LightningCLI configures it (`class_path`), it is
    rebuilt automatically.

    References:
        Snell, Swersky, Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017.
        Kim, Parviainen, Malde, "Distance-Ratio-Based Formulation for Metric Learning".

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from torch.utils.data import DataLoader
        >>> images = torch.tensor([[0.0], [1.0], [2.0], [6.0], [5.0], [7.0], [8.0], [9.0]])
        >>> data = list(zip(images, [0, 0, 0, 0, 1, 1, 1, 1], strict=True))
        >>> model = ProtoNet(nn.Flatten(), evaluation=EpisodeProtocol(ways=2, shots=1, queries=3, episodes=100))
        >>> trainer = Trainer(logger=False, enable_progress_bar=False, enable_checkpointing=False)
        >>> _ = trainer.validate(model, DataLoader(data, batch_size=4), verbose=False)
        >>> trainer.callback_metrics["val/accuracy"]
        tensor(0.7508)
    """

    def __init__(
        self,
        backbone: Literal["conv4", "resnet18"] | nn.Module = "conv4",
        head: HeadName | nn.Module = "dr",
        *,
        in_channels: int = 3,
        shots: int = 1,
        representation: Representation = "mean",
        episodes_per_batch: int = 1,
        learning_rate: float = 1e-3,
        evaluation: EpisodeProtocol | dict[str, int] = DEFAULT_PROTOCOL,
        val_episodes: int | None = None,
        batch_statistics: bool = False,
        evaluation_batches: Literal["images", "episodes"] = "images",
    ) -> None:
        super().__init__()
        warn_of_other_package("ProtoNet")
        check_representation(representation, "ProtoNet")
        self.evaluation = EpisodeProtocol(**evaluation) if isinstance(evaluation, dict) else evaluation
        val_episodes = self.evaluation.episodes if val_episodes is None else val_episodes
        # Validation may be shorter than the test, because its interval may be wider.
        self.validation = replace(self.evaluation, episodes=val_episodes)
        networks = {"backbone": backbone, "head": head}
        modules = [name for name, network in networks.items() if isinstance(network, nn.Module)]
        self.save_hyperparameters(ignore=[*modules, "evaluation", "val_episodes"])
        if "_instantiator" in self.hparams:  # LightningCLI passes the configuration of modules, which can be saved
            self.save_hyperparameters()
        else:  # plain numbers, so that any program can load the checkpoint
            self.save_hyperparameters({"evaluation": asdict(self.evaluation), "val_episodes": val_episodes})
        self.backbone = make_backbone(backbone, in_channels)
        self.head = make_head(head)
        self.representation: Representation = representation
        self.shots = shots
        self.episodes_per_batch = episodes_per_batch
        self.learning_rate = learning_rate
        self.batch_statistics = batch_statistics
        self.evaluation_batches = evaluation_batches
        _check_settings(self)
        self.evaluation_results: dict[str, EpisodeAccuracy] = {}
        # During an evaluation: the embeddings of each loader, or the accuracy of each of its episodes.
        self._stores: list[EmbeddingStore] = []
        # During an evaluation: loader index -> the reason why a batch cannot be used.
        self._misfits: dict[int, ValueError] = {}
        # The part of the data that this process evaluates. Only the first of the processes with the same part stores it.
        self._replica = Replica(number=0, replicas=1, is_first=True)
        # Stages and loaders for which a warning was given.
        self._warned: set[str] = set()
        # Stage and loader -> the episodes in the last message.
        self._announced: dict[str, str] = {}
        self._exponent_watch = ExponentWatch()

    def forward(self, images: Shaped[Tensor, "images *shape"]) -> Float[Tensor, "images dim"]:
        """Return the embeddings of images; (images, channel, height, width) for the named backbones."""
        return checked_embeddings(self.backbone(images), self.backbone, len(images), "ProtoNet")

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the `loss` of a batch of episodes, and its detached `embeddings` and its `labels`, for callbacks.

        All classes of all episodes have the same number of images, more than `shots`.
        """
        images, labels = batch
        self._exponent_watch.see(self.global_step, self.head)
        embeddings = self(images)  # (images, dim)
        loss, hits = score_batch(
            embeddings, labels, self.head, self.representation, self.shots, self.episodes_per_batch, "training"
        )
        # Each rank has different episodes, so the mean over all ranks is logged.
        self.log("train/loss", loss, prog_bar=True, sync_dist=True, batch_size=len(labels))
        # Not in the progress bar: in an 80-column terminal, it has about 18 columns for all values.
        self.log("train/accuracy", hits.mean(), sync_dist=True, batch_size=len(labels))
        if isinstance(self.head, DistanceRatioHead):
            self.log("train/rho", self.head.rho, batch_size=len(labels))
        return {"loss": loss, "embeddings": embeddings.detach(), "labels": labels}

    def setup(self, stage: str) -> None:
        """Forget the warnings and messages of an earlier run."""
        self._warned = set()
        self._announced = {}

    def on_train_end(self) -> None:
        """Check that rho is finite after the last steps."""
        self._exponent_watch.see(self.global_step, self.head, wait=True)

    def on_validation_epoch_start(self) -> None:
        """Drop the embeddings of an aborted epoch; in a fit, check that rho is finite."""
        # A checkpoint may be written after validation, and its rho must be finite.
        if self.trainer.state.fn == "fit":
            self._exponent_watch.see(self.global_step, self.head, wait=True)
        self._stores = [EmbeddingStore(call="ProtoNet") for _ in evaluation_loaders(self.trainer)]
        self._misfits = {}
        self._replica = replica_of(self.trainer)

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Sequence[Any], batch_idx: int, dataloader_idx: int = 0) -> StepOutput:
        """Return the `embeddings` and `labels` of a batch, for callbacks.

        With `evaluation_batches="episodes"`, return None: an image occurs in many episodes, but callbacks would count
        each row as a different image.
        """
        images, labels = batch
        store = self._stores[dataloader_idx]
        if self.evaluation_batches == "images":
            embeddings = self(images)
            read = labels_of_each(labels, len(embeddings), "labels", "embeddings", "ProtoNet", sets=True)
            try:
                if self._replica.is_first:
                    store.append(embeddings, read)
            except ValueError as misfit:
                # The batch cannot be combined with earlier batches. A metric must not end the run, so the values of this set
                # will be NaN.
                self._misfits.setdefault(dataloader_idx, misfit)
            return {"embeddings": embeddings, "labels": labels}
        with batch_norm_of_the_batch(self.backbone) if self.batch_statistics else nullcontext():
            embeddings = self(images)
        rows = non_finite_rows(embeddings)
        try:
            refuse_non_finite(rows, len(embeddings), "embeddings", "ProtoNet", f" of evaluation batch {batch_idx}")
        except ValueError as misfit:
            self._misfits.setdefault(dataloader_idx, misfit)
            return None
        accuracy = episode_accuracy(embeddings, labels, self.head, self.representation, self.evaluation)
        # A row of the store is an episode, and its only column is the accuracy.
        if self._replica.is_first:
            store.append(accuracy.reshape(1, 1), torch.tensor([batch_idx]))
        return None

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Score the episodes and log the result."""
        self._evaluate("val", self.validation)

    def on_test_epoch_end(self) -> None:
        """Score the episodes and log the result."""
        self._evaluate("test", self.evaluation)

    def predict_step(self, batch: Sequence[Any], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Return the `embeddings` and `labels` of a batch."""
        images, labels = batch
        return {"embeddings": self(images), "labels": labels}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam over backbone and head, without a schedule."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)

    def support_classifier(
        self, images: Shaped[Tensor, "images *shape"], labels: Shaped[Tensor, "images"]
    ) -> SupportClassifier:
        """Return a classifier of new classes, fitted to a few labelled images; use it after training.

        `classifier.predict(images)` returns the classes of other images. All images are embedded in evaluation mode.

        Args:
            images: The support images, on any device.
            labels: The class of each image. Classes may have different numbers of images.
        """
        return SupportClassifier(self.head, self.representation, embed=self._embed_for_use).fit(images, labels)

    def _embed_for_use(self, images: Tensor) -> Tensor:
        with evaluation_mode(self):
            embeddings: Tensor = self(images.to(self.device))
        return embeddings

    def _evaluate(self, stage: str, protocol: EpisodeProtocol) -> None:
        """Score the episodes of each loader, and log the results."""
        stores = self._stores
        self._stores = []
        if self.trainer.sanity_checking:
            return
        loaders = evaluation_loaders(self.trainer).values()
        for number, (store, loader) in enumerate(zip(stores, loaders, strict=True)):
            suffix = f"/dataloader_idx_{number}" if len(stores) > 1 else ""
            key = f"{stage}{suffix}"
            self.evaluation_results.pop(key, None)
            try:
                # If a process has an unusable batch, all processes learn of it; otherwise they would wait for its items.
                with all_processes().together():
                    if number in self._misfits:
                        raise self._misfits[number]
                    self.evaluation_results[key] = _accuracy_of(self, store, loader, protocol)
            except ValueError as error:
                if key not in self._warned:
                    self._warned.add(key)
                    warn(
                        f"{stage}/accuracy{suffix}, accuracy_std, accuracy_ci95 and accuracy_ci95_open are NaN, because "
                        f"nothing could be evaluated. {error}"
                    )
            result = self.evaluation_results.get(key)
            self._announce(key, result)
            for name, value in logged_values(result).items():
                # At the end of an epoch Lightning does not know the loader, so the name contains the suffix.
                self.log(f"{stage}/{name}{suffix}", value, prog_bar=name == "accuracy", add_dataloader_idx=False)

    def _announce(self, key: str, result: EpisodeAccuracy | None) -> None:
        """Print the episodes, and why values are NaN, whenever the episodes change."""
        if result is not None and self._announced.get(key) != result.episodes_in_words:
            self._announced[key] = result.episodes_in_words
            rank_zero_info(f"{key}: accuracies over {result.episodes_in_words}.")
            for note in result.notes:
                rank_zero_info(f"{key}: {note}")


def _accuracy_of(net: ProtoNet, store: EmbeddingStore, loader: Any, protocol: EpisodeProtocol) -> EpisodeAccuracy:
    """Return the accuracy of one loader, the same on every rank."""
    if net.evaluation_batches == "images":
        replica = net._replica
        embeddings, labels = store.gather(unpadded_length(loader, replica), (replica.number, replica.replicas))
        episodes = sample_episodes(labels, **asdict(protocol))
        return evaluate_episodes(
            embeddings, labels, net.head, episodes, representation=net.representation, device=net.device
        )
    accuracies, _ = store.gather()  # (episodes, 1)
    episode_list = getattr(getattr(loader, "batch_sampler", None), "episode_list", None)
    return summarize_batches(accuracies[:, 0], episode_list, protocol, batch_statistics=net.batch_statistics)


def _check_settings(net: ProtoNet) -> None:
    """Raise an error if a setting is out of range; see `ProtoNet`."""
    if net.shots < 1:
        raise InputError(
            f"ProtoNet(shots={net.shots}): a training episode needs a support image per class. Use shots >= 1."
        )
    if net.episodes_per_batch < 1:
        raise InputError(
            f"ProtoNet(episodes_per_batch={net.episodes_per_batch}): a batch needs an episode. Use at least 1."
        )
    if not 0 < net.learning_rate < math.inf:
        raise InputError(
            f"ProtoNet(learning_rate={net.learning_rate}): Adam needs a positive learning rate. The papers use 1e-3."
        )
    if net.evaluation_batches not in ("images", "episodes"):
        raise InputError(
            f"ProtoNet: there is no evaluation_batches={net.evaluation_batches!r}. Choose 'images' or 'episodes'."
        )
    if net.batch_statistics and net.evaluation_batches == "images":
        raise InputError(
            "ProtoNet(batch_statistics=True) normalises with the statistics of an episode, but with "
            "evaluation_batches='images' a batch is not an episode. Use evaluation_batches='episodes' with a loader of "
            "whole episodes, or batch_statistics=False."
        )
    if net.batch_statistics and not batch_norms(net.backbone):
        raise InputError(
            f"ProtoNet(batch_statistics=True) only affects batch norm, and {type(net.backbone).__name__} has none. "
            "Use batch_statistics=False."
        )
