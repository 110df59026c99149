"""Measures the effect of single optimiser steps on the embeddings of their episode."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping
from operator import index
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fewshot_callbacks.callbacks._capture import hooks_ignored
from fewshot_callbacks.callbacks._conduct import FailurePolicy, UsageError, check_at_least
from fewshot_callbacks.callbacks._embedder import Embedder
from fewshot_callbacks.callbacks._embedding_reader import EmbeddingReader
from fewshot_callbacks.callbacks.embedding_source import STEP_KEYS, EmbeddingSource, Source
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.addresses import is_address, upload
from fewshot_callbacks.files.outputs import free_path
from fewshot_callbacks.functional._labels import Labels
from fewshot_callbacks.functional.dynamics import (
    Centering,
    DynamicsHistory,
    StepDynamics,
    check_centering,
    episode_in,
    training_dynamics,
)
from fewshot_callbacks.settings import NoFile
from fewshot_callbacks.trainer.lightning import Callback, LightningModule, Trainer
from fewshot_callbacks.trainer.logs import run_folder
from fewshot_callbacks.trainer.side_effects import without_side_effects

FILE = "training_dynamics.json"
# Fields of `StepDynamics` that are logged.
LOGGED = ("alpha", "norm_ratio", "psi_con", "psi_div", "con_alpha", "div_alpha", "con_div")


class StepMeter:
    """Embeds the episode of a batch before and after its optimiser steps, and measures how far the embeddings have moved.

    For each batch the calls are `start`, then `embed_before` and `measure` if a step is measured, then `stop`. The batch and
    its embeddings are held from `start` to `stop`.

    Args:
        embedder: Embeds a batch.
        sizes: `shots` and `episodes_per_batch`; None for a size that is an attribute of the module.
        centering: See `training_dynamics`.
        policy: Warns.
    """

    def __init__(
        self, embedder: Embedder, sizes: Mapping[str, int | None], centering: Centering, policy: FailurePolicy
    ) -> None:
        self.embedder = embedder
        self.sizes = sizes
        self.centering = centering
        self.policy = policy
        # whether embeddings of this run were compared with embeddings that a step returned
        self.is_compared = False
        self.stop()

    def start(self, batch: Any) -> None:
        """Keep a batch before its step."""
        self._batch = batch
        # embeddings and labels before the step; None if they are not needed
        self._before: tuple[Tensor, Labels] | None = None

    def stop(self) -> None:
        """Drop the batch and its embeddings."""
        self.start(None)

    def embed_before(self, trainer: Trainer, module: LightningModule, seed: int) -> None:
        """Embed the batch before its first step. The dropout has the same seed before and after."""
        self._seed = seed
        self._before = self._embed(trainer, module, seed)

    def measure(self, trainer: Trainer, module: LightningModule, outputs: Any) -> StepDynamics | None:
        """Embed the batch after its steps, and return how it has moved; None if it was not embedded before them.

        A warning is given for measures that are undefined.
        """
        if self._before is None:
            return None
        before, labels = self._before
        after, _ = self._embed(trainer, module, self._seed)
        if not self.is_compared:
            self._check(trainer, module, outputs, before, after)
            self.is_compared = True
        shots, episodes = self.episode_sizes(module)
        if episodes == 1:
            chosen, size, classes = episode_in(labels.codes.cpu(), shots)
            left_out = len(labels) - len(chosen)
            if left_out:
                before = before[chosen]
                after = after[chosen]
                labels = labels[chosen]
                self.policy.warn(
                    f"TrainingDynamicsMonitor: the batch is not an episode. Measured are {size} items of each of the "
                    f"{classes} classes that have more than shots={shots}; {left_out} of {left_out + len(chosen)} items are "
                    "left out. An EpisodicBatchSampler gives episodes. (Shown once.)",
                    kind="no episode",
                )
        dynamics = training_dynamics(before, after, labels, shots=shots, episodes=episodes, centering=self.centering)
        if dynamics.undefined:
            reasons = "; ".join(dynamics.undefined)
            names = [name for name in LOGGED if math.isnan(getattr(dynamics, name))]
            fact = f"{reasons[0].upper()}{reasons[1:]}; step {trainer.global_step}."
            self.policy.handle(ValueError(fact), f"dynamics are NaN ({', '.join(names)}).")
        return dynamics

    def _embed(self, trainer: Trainer, module: LightningModule, seed: int) -> tuple[Tensor, Labels]:
        """Embed the batch in the modes of training, without side effects."""
        with hooks_ignored(), without_side_effects(module, seed):
            embeddings, labels = self.embedder(trainer, module, self._batch)
            return embeddings.clone(), labels

    def _check(self, trainer: Trainer, module: LightningModule, outputs: Any, before: Tensor, after: Tensor) -> None:
        """Check that the embeddings that the step returned, if any, equal the monitor's.

        Raises:
            UsageError: If they differ. Only the shapes are compared if the forward pass draws random numbers, or
                weights may have changed before the step embedded.
        """
        reader = self.embedder.reader
        # The output of a submodule is embedded; a function reads something other than the step's embeddings.
        source = reader.source.source
        returned = None
        if isinstance(outputs, Mapping) and (source is None or isinstance(source, tuple)):
            returned = outputs.get(reader.keys[0])
        if isinstance(returned, Tensor):
            step_embeddings = returned.detach()
            if before.shape == step_embeddings.shape:
                # If another seed changes the embeddings, they cannot be compared with the step's embeddings, which have
                # a third seed.
                other_seed, _ = self._embed(trainer, module, self._seed + 1)
                if not (module.automatic_optimization and after.equal(other_seed)):
                    return
            self.embedder.compare(before, step_embeddings, module, "training_step", "the dynamics would mean nothing")
        elif self.embedder.embed is None:
            self.policy.warn(
                f"TrainingDynamicsMonitor takes what {type(module).__name__}.forward returns for the embeddings; "
                "training_step returned none to compare with. If forward returns something else, such as class scores, pass "
                "source=EmbeddingSource(embed='name.of.a.submodule'); if not, pass as embed lambda module, batch: "
                "module(batch[0]) to say so."
            )

    def episode_sizes(self, module: LightningModule) -> tuple[int, int]:
        """Return the shots and the episodes in a batch, from the settings or from the module."""
        return self._size(module, "shots", None), self._size(module, "episodes_per_batch", 1)

    def _size(self, module: LightningModule, name: str, default: int | None) -> int:
        """Return a setting, or else the attribute of the module with its name.

        Raises:
            UsageError: If there is neither, or it is not a whole number.
        """
        size: Any = self.sizes[name]
        if size is None:
            size = getattr(module, name, default)
        try:
            return index(size)
        except TypeError:
            raise UsageError(
                f"TrainingDynamicsMonitor needs the {name.replace('_', ' ')}: {type(module).__name__} has no "
                f"attribute {name!r} that is a whole number. Pass {name}=..., as the episodes of training have it."
            ) from None


def is_earlier_part(file: Path, resumed: DynamicsHistory) -> bool:
    """Return whether a file contains a history that shares steps with a checkpoint's history, with equal measures."""
    if not file.is_file():
        return False
    try:
        in_file = DynamicsHistory.load(file)
    except (OSError, ValueError):
        return False
    shared = set(in_file.steps) & set(resumed.steps)

    def part(history: DynamicsHistory) -> dict[str, Any]:
        measures = {step: measure for step, measure in history if step in shared}
        # The comparison uses plain values, in which NaN equals NaN.
        return DynamicsHistory(tuple(measures), tuple(measures.values()), history.centering).to_dict()

    return bool(shared) and part(in_file) == part(resumed)


class TrainingDynamicsMonitor(Callback):
    """Measures the effect of one in `every_n_steps` optimiser steps on the embeddings of its episode.

    The episode is embedded twice more, just before and just after the step, with the same dropout and the modules in
    the modes of training. The following measures are logged as `dynamics/...` (see `StepDynamics`): `alpha`, the change
    of scale; `norm_ratio`, the share of the movement that is not a change of scale; `psi_con` and `psi_div`, the change
    of the distances to the query's own class and to the other classes; and the three ratios `con_alpha`, `div_alpha`
    and `con_div`. A measure is NaN where it is undefined.

    The monitor has no side effects: parameters, gradients, buffers (running statistics) and random states are the same
    as without it, bit for bit. With gradient accumulation it measures the step that updates the weights, on the last
    batch. If a batch takes several steps (several optimisers, manual optimisation, line searches), it measures all of
    them together. A step that a gradient scaler skips moves nothing, and gives NaN. If a batch is not an episode, for
    instance from a shuffled loader, the same number of items is taken from each class that has more than `shots` items,
    and a warning reports it once. With several ranks each measures its own episode, and only the first rank's values
    are logged and kept.

    Args:
        every_n_steps: Measure one update of the weights in this number, at least 1; the paper uses 100. Choose a
            multiple of the Trainer's `log_every_n_steps`, so that loggers write fresh values.
        shots: Number of support images per class in the episode; by default the module's attribute `shots`. The first
            images of each class in the batch are its support.
        episodes_per_batch: Number of consecutive episodes in a batch; by default the module's attribute of that name,
            or 1.
        source: Two keys of the mapping that the step returns, under which embeddings and labels are looked up; or an
            `EmbeddingSource`, which also says where the labels are in the batch, and in `embed` how a batch is embedded; by
            default the module itself is called with its inputs. If the step gives embeddings, the first ones are compared
            with those of `embed`.
        centering: `"points"` subtracts the average embedding, as the paper says; `"coordinates"` subtracts from each
            embedding the mean of its own coordinates, as the authors' published program does.
        prefix: First part of the logged keys; a second monitor in the same Trainer needs another prefix and another file.
        file: Where the history is written as JSON for `compare_dynamics` and `fewshot compare`: a name in the folder of
            the Trainer's logger (nothing is written without a logger), or an absolute path. It is written at the end of
            each epoch and of the run. A file at an absolute path is replaced; one in the folder of the logger only if this
            run, or the part of it before its checkpoint, has written it. Otherwise the next name is taken, such as
            `training_dynamics-2.json`, with a warning. None writes no file.
        strict: Which errors end the run. None: a mistake in the settings or in what a step returns (no embeddings, no
            such loader) ends the run, at the first step that is measured; an error that may pass, such as a diverged
            batch, is a warning, once in a run, and the values are NaN. True: every error ends the run. False: no error
            does.

    Attributes:
        history: The measured steps, a `DynamicsHistory`; checkpoints hold it, and a resumed run continues it.

    Raises:
        ValueError: If a setting is out of range.

    References:
        Kim, Parviainen, Malde, "Distance-Ratio-Based Formulation for Metric Learning", section 3.1 and appendix C.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> monitor = TrainingDynamicsMonitor(every_n_steps=100)
        >>> trainer = Trainer(callbacks=[monitor], logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        *,
        every_n_steps: int = 100,
        shots: int | None = None,
        episodes_per_batch: int | None = None,
        source: EmbeddingSource | Source | NoFile = STEP_KEYS,
        centering: Centering = "points",
        prefix: str = "dynamics",
        file: str | None = FILE,
        strict: bool | None = None,
    ) -> None:
        owner = type(self).__name__
        sizes = {"shots": shots, "episodes_per_batch": episodes_per_batch}
        check_at_least(1, owner, every_n_steps=every_n_steps, **sizes)
        check_centering(centering, owner)
        self.every_n_steps = every_n_steps
        self.centering = centering
        self.prefix = prefix
        self.file = file
        self._reader = EmbeddingReader(EmbeddingSource.of(source, owner), owner)
        self._policy = FailurePolicy(owner, strict)
        self._meter = StepMeter(Embedder(self._reader), sizes, centering, self._policy)
        # step -> measures
        self._history: dict[int, StepDynamics] = {}
        self._resumed = DynamicsHistory()
        # file that this run has written
        self._path: Path | None = None
        self._is_uploaded = False
        # number of batches of all epochs with an optimiser step
        self._updates = 0
        # batches of this epoch, and batches with an optimiser step
        self._batches = 0
        self._stepping_batches = 0
        # number of optimiser steps of this batch, and whether they are measured
        self._steps = 0
        self._is_due = False

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint, different for several monitors."""
        settings = {"prefix": self.prefix, "centering": self.centering}
        return f"{type(self).__qualname__}{settings}"

    @property
    def history(self) -> DynamicsHistory:
        """The measured steps so far."""
        steps = sorted(self._history)
        return DynamicsHistory(tuple(steps), tuple(self._history[step] for step in steps), self.centering)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a new history, unless a fit is resumed.

        Raises:
            ValueError: If another monitor has the same keys or the same file.
        """
        self._policy.begin()
        for other in trainer.callbacks:  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
            alike = isinstance(other, TrainingDynamicsMonitor) and other is not self
            if alike and (other.prefix == self.prefix or (self.file is not None and other.file == self.file)):
                raise InputError(
                    "Two TrainingDynamicsMonitors in one Trainer would log under the same keys or write the same file. Give "
                    "one of them another prefix=... and another file=...."
                )
        # A checkpoint is read after this hook. A second fit with the same Trainer continues to count steps, and keeps
        # the history.
        if stage == "fit" and trainer.global_step == 0:
            self._history = {}
            self._resumed = DynamicsHistory()
            self._path = None
            self._is_uploaded = False
            self._updates = 0
            self._meter.is_compared = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the sizes of the episodes, and that the module, after its layers are made, has the submodule of `embed`.

        Raises:
            UsageError: If a size is unknown, or the submodule does not exist.
        """
        self._meter.embedder.check_name(pl_module)
        with self._policy.handling("dynamics are NaN."):
            self._meter.episode_sizes(pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the counts of the epoch."""
        self._batches = 0
        self._stepping_batches = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the batch until it is known whether the optimiser steps after it."""
        self._is_due = False
        self._steps = 0
        self._meter.start(batch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Embed the episode with the weights as they are, before the first step of this batch."""
        self._steps += 1
        self._is_due = (self._updates + 1) % self.every_n_steps == 0
        # This only runs before the first step: several steps of one batch are measured together.
        if self._is_due and self._steps == 1:
            with self._policy.handling("dynamics are NaN."):
                # Each update has two seeds: the second one shows whether the forward pass is random.
                self._meter.embed_before(trainer, pl_module, seed=2 * self._updates)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Embed the episode with the new weights, measure, log."""
        self._batches += 1
        if self._steps > 0:
            self._stepping_batches += 1
            self._updates += 1
        dynamics = None
        with self._policy.handling("dynamics are NaN."):
            dynamics = self._meter.measure(trainer, pl_module, outputs)
        self._meter.stop()
        if dynamics is not None:
            self._history[trainer.global_step] = dynamics
        if not self._is_due:
            return
        for name in LOGGED:
            value = float("nan") if dynamics is None else getattr(dynamics, name)
            pl_module.log(f"{self.prefix}/{name}", value, on_step=True, on_epoch=False, batch_size=1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the history; warn of an epoch without optimiser steps that Lightning knows of."""
        self._write(trainer)
        # An epoch may have no step if it has fewer batches than one step accumulates.
        if self._batches >= max(1, trainer.accumulate_grad_batches) and self._stepping_batches == 0:
            fact = (
                f"Lightning announced no optimiser step in {self._batches} batches, so none could be measured. With manual "
                "optimisation, step through Lightning's wrapper: self.optimizers().step()."
            )
            self._policy.handle(ValueError(fact), "There are no dynamics.")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Drop the batch, and write the history of the interrupted epoch."""
        self.teardown(trainer, pl_module, "")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop the batch, and write the history, also after an interrupted epoch."""
        self._meter.stop()
        self._write(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the history and the number of updates."""
        return {"history": self.history.to_dict(), "updates": self._updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the history of a checkpoint."""
        self._updates = state_dict["updates"]
        history = DynamicsHistory.from_dict(state_dict["history"])
        if len(history) and history.centering != self.centering:
            self._policy.warn(
                f"{self._policy.owner}: the checkpoint's training dynamics were centred by {history.centering!r}, those to "
                f"come are by {self.centering!r}: the history starts anew. Pass centering={history.centering!r} to "
                "continue it."
            )
            return
        self._history = dict(history)
        self._resumed = history

    def _write(self, trainer: Trainer) -> None:
        """Write the history, on the first rank: in the folder of the first logger, or at an absolute path."""
        if self.file is None or not self._history or not trainer.is_global_zero or trainer.state.fn != "fit":
            return
        is_absolute = Path(self.file).is_absolute()
        fast_dev_run: Any = trainer.fast_dev_run  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
        if not is_absolute and (fast_dev_run or not trainer.loggers):
            return
        folder = run_folder(trainer)
        if is_address(folder) and not is_absolute:
            self._upload(posixpath.join(folder, self.file))
            return
        path = Path(folder) / self.file
        with self._policy.handling(f"The training dynamics could not be written to {path}."):
            if self._path is None:
                self._path = path if is_absolute else self._path_in_run(path)
            self.history.save(self._path)

    def _upload(self, address: str) -> None:
        """Write the history to an address, unless a file there does not contain an earlier part of it."""
        with (
            self._policy.handling(f"The training dynamics could not be written to {address}."),
            TemporaryDirectory() as folder,
        ):
            path = Path(folder) / posixpath.basename(address)
            self.history.save(path)
            upload(path, address, lambda file: self._is_uploaded or is_earlier_part(file, self._resumed))
            self._is_uploaded = True

    def _path_in_run(self, path: Path) -> Path:
        """Return `path`, or the next free name in its folder if the file does not have an earlier part of this history."""
        free = free_path(path, lambda file: is_earlier_part(file, self._resumed))
        if free != path:
            fact = f"{type(self).__name__}: {path} was not written in this run and is left as it is."
            self._policy.warn(f"{fact} The training dynamics are in {free.name} beside it.")
        return free
