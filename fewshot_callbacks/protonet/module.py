"""Prototypical networks as a LightningModule: trains on episodes, evaluates on a fixed list of them."""

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

# Largest ln rho: above it rho is infinite in float32.
MAX_LOG_RHO = math.log(torch.finfo(torch.float32).max)
# Steps between two checks of rho on an accelerator, since each check waits for it.
ACCELERATOR_INTERVAL = 50


class ExponentWatch:
    """Stops a run if rho has become infinite or NaN.

    On a CPU it looks at every step. An accelerator would have to be waited for at each look, so there it looks once in
    50 steps, at all values since the last look: the step that it names is the right one.

    Args:
        interval: Steps between two looks, instead of these.
    """

    def __init__(self, interval: int | None = None) -> None:
        self.interval = interval
        # Steps and their ln rho since the last check.
        self._recorded: list[tuple[int, Tensor]] = []
        # The last step with a finite rho, and that rho.
        self._last_finite: tuple[int, float] | None = None

    def see(self, step: int, head: nn.Module, *, wait: bool = False) -> None:
        """Record rho before a step, and look at the recorded values if it is time.

        Args:
            step: Number of the step.
            head: The head with the exponent; any other head is ignored.
            wait: Check at once, as before a checkpoint or the end of a run.

        Raises:
            ValueError: Rho is no longer a finite number.
        """
        if not isinstance(head, DistanceRatioHead):
            return
        # The value is copied, since the optimiser writes the next value into the same tensor.
        self._recorded.append((step, head.log_rho.detach().clone()))
        interval = self.interval
        if not interval:
            interval = 1 if head.log_rho.device.type == "cpu" else ACCELERATOR_INTERVAL
        if wait or len(self._recorded) >= interval:
            self._look()

    def _look(self) -> None:
        recorded = self._recorded
        self._recorded = []
        log_rhos = torch.stack(
            [log_rho for _, log_rho in recorded]
        ).tolist()  # the only moment that waits for the device
        for (step, _), log_rho in zip(recorded, log_rhos, strict=True):
            rho = math.exp(log_rho) if log_rho <= MAX_LOG_RHO else log_rho * math.inf  # infinity, or NaN for NaN
            if not (math.isfinite(rho) and math.isfinite(log_rho)):
                raise InputError(
                    f"rho of the distance-ratio head became {rho} at step {step} (ln rho = {log_rho:.4g}); "
                    f"{self._last_finite_in_words()}. The training has diverged: lower the learning rate, clip "
                    "gradients (Trainer(gradient_clip_val=1.0)), or look for images that are not finite. Earlier "
                    "checkpoints are not affected."
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
    """A prototypical network: it averages the support embeddings of each class, and compares queries with the averages.

    Each training batch `(images, labels)` is one episode, as an `EpisodicBatchSampler` draws it, or
    `episodes_per_batch` consecutive episodes; the rows of an episode may come in any order. An evaluation batch is by
    default a plain batch `(images, labels)`: every image is embedded once, in evaluation mode, and at the end of the
    epoch a seeded list of episodes is drawn among the embeddings, which gives exactly the result of a forward pass of
    each episode. The list refers to images by their order in the loader, so that it is the same in every epoch; leave
    `shuffle` off.

    Logged while training: `train/loss` (mean cross-entropy of the queries, in nats), `train/accuracy` in [0, 1] and,
    with the distance-ratio head, `train/rho`. Logged for each evaluation, as `val/...` or `test/...`, the same on every
    rank: `accuracy` in [0, 1], `accuracy_std` over episodes, `accuracy_ci95` (half-width of the 95 % interval over other
    episodes of these classes) and `accuracy_ci95_open` (the same over another set of classes). With several loaders each
    key ends in `/dataloader_idx_0`, and so on. A message names the episodes once in a run, and again if they change: their
    number, their sizes, the hash of their list, and whether batch statistics were used. `evaluation_results` has them, too.

    If the episodes cannot be drawn from the images (a class is too small, a run is cut by `limit_val_batches` or
    `fast_dev_run`, embeddings are not finite, labels are strings in some batches and integers in others), the values are
    NaN, and one warning gives the reason.
    Nothing is evaluated during Lightning's sanity check.

    Args:
        backbone: The network from images to embeddings: `conv4`, `resnet18`, or a module that returns (images, dim).
        head: The mapping from distances to logits: `dr` for the distance-ratio head, `softmax` for the head of
            prototypical networks, or a module `(query, prototypes) -> logits`, such as
            `DistanceRatioHead(distance="angular")`.
        in_channels: Channels of the images, for a backbone given by name.
        shots: Support images per class in a training episode, at least 1.
        representation: What represents a class, in training and evaluation: the `mean` of its support, or its support point
            `nearest` to the query, see `class_logits`.
        episodes_per_batch: Number of episodes in a training batch, at least 1, all of equal size; the loss is the mean
            over all queries. Batch norm normalises them together.
        learning_rate: Step size of Adam, positive.
        evaluation: The episodes that are drawn for validation and test; a mapping with the same fields, as in
            checkpoints, is accepted, too.
        val_episodes: Number of episodes that are drawn for validation; by default as many as for the test.
        batch_statistics: Let batch norm use the statistics of the episode during evaluation. The prediction for a query
            then depends on the other queries (a transductive setting, which scores higher), so the flag is part of
            `evaluation_results`. Running statistics are neither used nor changed.
        evaluation_batches: `images`: each evaluation batch holds any images. `episodes`: each evaluation batch is one
            episode of the sizes in `evaluation`, as an `EpisodicBatchSampler(..., fixed=True)` draws it.

    Attributes:
        evaluation_results: The latest `EpisodeAccuracy` of each stage, by `"val"` or `"test"`; with several loaders by
            `"val/dataloader_idx_0"` and so on. There is no entry if the latest evaluation failed.

    Raises:
        ValueError: If a number is too small, a name is unknown, or `batch_statistics` is requested where it has no
            meaning: with `evaluation_batches="images"`, or with a backbone without batch norm. In a training: if rho
            becomes infinite or NaN; the message names the step and the last finite value.

    Note: If a backbone or head is passed as a module, the checkpoint holds its weights but not its construction: pass
    it again, `ProtoNet.load_from_checkpoint(path, backbone=MyBackbone())`. If it is configured with LightningCLI
    (`class_path`), it is rebuilt automatically.

    References:
        Snell, Swersky, Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017.
        Kim, Parviainen, Malde, "Distance-Ratio-Based Formulation for Metric Learning".

    Examples:
        >>> import torch
        >>> model = ProtoNet("conv4", head="dr", in_channels=1, evaluation=EpisodeProtocol(ways=20))
        >>> model(torch.zeros(2, 1, 32, 32)).shape
        torch.Size([2, 256])
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
        # A validation may be shorter than the test: its interval need not be as narrow.
        self.validation = replace(self.evaluation, episodes=val_episodes)
        networks = {"backbone": backbone, "head": head}
        modules = [name for name, network in networks.items() if isinstance(network, nn.Module)]
        self.save_hyperparameters(ignore=[*modules, "evaluation", "val_episodes"])
        if "_instantiator" in self.hparams:  # LightningCLI hands over a module's configuration, which can be saved
            self.save_hyperparameters()
        else:  # plain numbers, which any reader of a checkpoint can load
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
        # While an evaluation runs: the embeddings of each loader, or the accuracy of each of its episodes.
        self._stores: list[EmbeddingStore] = []
        # While an evaluation runs: the number of a loader -> why a batch did not fit its earlier ones, or is not finite.
        self._misfits: dict[int, ValueError] = {}
        # The part of the data of this process in this evaluation; a process that sees those of another stores nothing.
        self._replica = Replica(number=0, replicas=1, is_first=True)
        # Stages and loaders whose failure was warned of.
        self._warned: set[str] = set()
        # Stage and loader -> the episodes that were named in the last message.
        self._announced: dict[str, str] = {}
        self._exponent_watch = ExponentWatch()

    def forward(self, images: Shaped[Tensor, "images *shape"]) -> Float[Tensor, "images dim"]:
        """Embed images; (images, channel, height, width) for the named backbones."""
        return checked_embeddings(self.backbone(images), self.backbone, len(images), "ProtoNet")

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Compute the loss of one episode or of several; all have equally many images of each class, more than `shots`.

        Returns:
            The `loss`; for callbacks also the detached `embeddings` and the `labels` of the whole batch.
        """
        images, labels = batch
        self._exponent_watch.see(self.global_step, self.head)
        embeddings = self(images)  # (images, dim)
        loss, hits = score_batch(
            embeddings, labels, self.head, self.representation, self.shots, self.episodes_per_batch, "training"
        )
        # Each rank has other episodes, so the mean over all ranks is logged.
        self.log("train/loss", loss, prog_bar=True, sync_dist=True, batch_size=len(labels))
        # The progress bar of an 80-column terminal has about 18 columns for all values, so this one is only in the
        # logs.
        self.log("train/accuracy", hits.mean(), sync_dist=True, batch_size=len(labels))
        if isinstance(self.head, DistanceRatioHead):
            self.log("train/rho", self.head.rho, batch_size=len(labels))
        return {"loss": loss, "embeddings": embeddings.detach(), "labels": labels}

    def setup(self, stage: str) -> None:
        """Forget the warnings and messages of an earlier run."""
        self._warned = set()
        self._announced = {}

    def on_train_end(self) -> None:
        """Check that the last steps left a number in rho."""
        self._exponent_watch.see(self.global_step, self.head, wait=True)

    def on_validation_epoch_start(self) -> None:
        """Drop the embeddings of an aborted epoch; in a fit, check that rho is still a number."""
        # A checkpoint may be written after validation, and must not have a rho that is not finite.
        if self.trainer.state.fn == "fit":
            self._exponent_watch.see(self.global_step, self.head, wait=True)
        self._stores = [EmbeddingStore(call="ProtoNet") for _ in evaluation_loaders(self.trainer)]
        self._misfits = {}
        self._replica = replica_of(self.trainer)

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Sequence[Any], batch_idx: int, dataloader_idx: int = 0) -> StepOutput:
        """Embed one batch; return its `embeddings` and `labels`, for callbacks.

        With `evaluation_batches="episodes"` it returns None: an image occurs in many episodes, and a callback that treats
        each row as a different image would be wrong.
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
                # The batch does not fit the earlier ones. A metric must not end the run: the values of this set will be
                # NaN.
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
        # An episode is a row of the store, and its accuracy the only column.
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
        """Embed one batch; return `embeddings` and `labels`."""
        images, labels = batch
        return {"embeddings": self(images), "labels": labels}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam over backbone and head, without a schedule."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)

    def support_classifier(
        self, images: Shaped[Tensor, "images *shape"], labels: Shaped[Tensor, "images"]
    ) -> SupportClassifier:
        """Make a classifier of new classes from a few labelled images, for use after training.

        Args:
            images: The support images, on any device.
            labels: The class of each image; classes may have different numbers of images.

        Returns:
            A classifier of images, all embedded in evaluation mode: `predict(others)` names their classes.
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
                # A process with batches that do not fit each other informs the others, which would wait for its items.
                with all_processes().together():
                    if number in self._misfits:
                        raise self._misfits[number]
                    self.evaluation_results[key] = _accuracy_of(self, store, loader, protocol)
            except ValueError as error:
                if key not in self._warned:
                    self._warned.add(key)
                    warn(
                        f"{stage}/accuracy{suffix}, with accuracy_std, accuracy_ci95 and accuracy_ci95_open, is NaN, "
                        f"because nothing could be evaluated. {error}"
                    )
            result = self.evaluation_results.get(key)
            self._announce(key, result)
            for name, value in logged_values(result).items():
                # At the end of an epoch Lightning no longer knows the loader, so the suffix is part of the name.
                self.log(f"{stage}/{name}{suffix}", value, prog_bar=name == "accuracy", add_dataloader_idx=False)

    def _announce(self, key: str, result: EpisodeAccuracy | None) -> None:
        """Print which episodes were scored, and why their values are NaN, once and again when they change."""
        if result is not None and self._announced.get(key) != result.episodes_in_words:
            self._announced[key] = result.episodes_in_words
            rank_zero_info(f"{key}: accuracies are of {result.episodes_in_words}.")
            for note in result.notes:
                rank_zero_info(f"{key}: {note}")


def _accuracy_of(net: ProtoNet, store: EmbeddingStore, loader: Any, protocol: EpisodeProtocol) -> EpisodeAccuracy:
    """Return the accuracy of one loader; equal on every rank, because `gather` is."""
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
    """Refuse settings out of range; see `ProtoNet`."""
    if net.shots < 1:
        raise InputError(
            f"ProtoNet(shots={net.shots}): a training episode needs a support image per class. Use shots >= 1."
        )
    if net.episodes_per_batch < 1:
        raise InputError(
            f"ProtoNet(episodes_per_batch={net.episodes_per_batch}): a batch needs at least one episode. Use 1 or more."
        )
    if not 0 < net.learning_rate < math.inf:
        raise InputError(
            f"ProtoNet(learning_rate={net.learning_rate}): Adam needs a positive step. The papers use 1e-3."
        )
    if net.evaluation_batches not in ("images", "episodes"):
        raise InputError(
            f"ProtoNet: there is no evaluation_batches={net.evaluation_batches!r}. Choose 'images' or 'episodes'."
        )
    if net.batch_statistics and net.evaluation_batches == "images":
        raise InputError(
            "ProtoNet(batch_statistics=True) normalises with the statistics of an episode, but with "
            "evaluation_batches='images' a batch is not an episode. Use evaluation_batches='episodes', with a "
            "loader of whole episodes, or batch_statistics=False."
        )
    if net.batch_statistics and not batch_norms(net.backbone):
        raise InputError(
            f"ProtoNet(batch_statistics=True) only affects batch norm, and {type(net.backbone).__name__} has none. "
            "Use batch_statistics=False."
        )
