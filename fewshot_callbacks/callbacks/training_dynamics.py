"""The effect of single optimiser steps on the embeddings of their episode."""

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
    """Embeds the episode of a batch before and after its optimiser steps, and measures how far it has moved.

    Call for each batch: `start`, then `embed_before` and `measure` if the step is measured, then `stop`. It keeps the
    batch and its embeddings from `start` to `stop`.

    Args:
        embedder: Embeds a batch.
        sizes: `shots` and `episodes_per_batch`; None for a size that is an attribute of the module.
        centering: See `training_dynamics`.
        policy: Gives warnings.
    """

    def __init__(
        self, embedder: Embedder, sizes: Mapping[str, int | None], centering: Centering, policy: FailurePolicy
    ) -> None:
        self.embedder = embedder
        self.sizes = sizes
        self.centering = centering
        self.policy = policy
        # whether this run has compared its embeddings with embeddings that a step returned
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
        """Embed the batch before its first step. Dropout has the same seed before and after it."""
        self._seed = seed
        self._before = self._embed(trainer, module, seed)

    def measure(self, trainer: Trainer, module: LightningModule, outputs: Any) -> StepDynamics | None:
        """Embed the batch after its steps, and return how it has moved; None without a call of `embed_before`.

        Undefined measures give a warning.
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
                    f"TrainingDynamicsMonitor: the batch is not an episode. It measures {size} items of each of the "
                    f"{classes} classes that have more than shots={shots}, and leaves out {left_out} of "
                    f"{left_out + len(chosen)} items. An EpisodicBatchSampler gives episodes. (Shown once.)",
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
        """Embed the batch in training mode, without side effects."""
        with hooks_ignored(), without_side_effects(module, seed):
            embeddings, labels = self.embedder(trainer, module, self._batch)
            return embeddings.clone(), labels

    def _check(self, trainer: Trainer, module: LightningModule, outputs: Any, before: Tensor, after: Tensor) -> None:
        """Check that the embeddings that the step returned, if any, equal the monitor's embeddings.

        Raises:
            UsageError: If they differ. If the forward pass draws random numbers, or weights may have changed before the
                step embedded, only the shapes are compared.
        """
        reader = self.embedder.reader
        # Only two keys, or no source, name the embeddings that the step returned.
        source = reader.source.source
        returned = None
        if isinstance(outputs, Mapping) and (source is None or isinstance(source, tuple)):
            returned = outputs.get(reader.keys[0])
        if isinstance(returned, Tensor):
            step_embeddings = returned.detach()
            if before.shape == step_embeddings.shape:
                # If the seed changes the embeddings, they cannot be compared: the step had yet another seed.
                other_seed, _ = self._embed(trainer, module, self._seed + 1)
                if not (module.automatic_optimization and after.equal(other_seed)):
                    return
            self.embedder.compare(before, step_embeddings, module, "training_step", "the dynamics would be meaningless")
        elif self.embedder.embed is None:
            self.policy.warn(
                f"TrainingDynamicsMonitor uses the output of {type(module).__name__}.forward as embeddings, and "
                "training_step returned none to compare with. If forward returns something else, such as class scores, pass "
                "source=EmbeddingSource(embed='name.of.a.submodule'). If it returns embeddings, confirm it with "
                "source=EmbeddingSource(embed=lambda module, batch: module(batch[0]))."
            )

    def episode_sizes(self, module: LightningModule) -> tuple[int, int]:
        """Return the shots and the number of episodes in a batch, from the settings or the module."""
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
                f"attribute {name!r} that is a whole number. Pass {name}=... of your training episodes."
            ) from None


def is_earlier_part(file: Path, resumed: DynamicsHistory) -> bool:
    """Return whether a file has a history that shares steps with a resumed history, with equal measures."""
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

    It logs these keys. See `StepDynamics` for the formulas. A measure is NaN if it is undefined.

    - `dynamics/alpha`: change of scale
    - `dynamics/norm_ratio`: fraction of the movement that is not a change of scale
    - `dynamics/psi_con`, `dynamics/psi_div`: change of the distances to the own class, and to the other classes
    - `dynamics/con_alpha`, `dynamics/con_div`: `psi_con` relative to `alpha` and to `psi_div` (lower is better)
    - `dynamics/div_alpha`: `psi_div` relative to `alpha` (higher is better)

    The episode is embedded just before and just after the step, in training mode and with the same dropout. Parameters,
    gradients, buffers and random states are bit-identical to a run without the monitor.

    With gradient accumulation, the last batch before the update is measured. If a batch takes several steps (several
    optimisers, manual optimisation, line searches), they are measured together. A step that a gradient scaler skips
    gives NaN. If a batch is not an episode, for instance from a shuffled loader, the same number of items is taken from
    each class that has more than `shots` items, with one warning. Each process measures its own episode; only the first
    process's values are logged and kept.

    Examples:
        >>> import torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.encoder = torch.nn.Linear(1, 1, bias=False)
        ...         torch.nn.init.ones_(self.encoder.weight)
        ...     def training_step(self, batch, batch_idx):
        ...         return -self.encoder.weight.sum()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=1.0)  # one step doubles the weight
        >>> items = torch.tensor([[0.0], [1.0], [4.0], [6.0]])
        >>> loader = DataLoader(TensorDataset(items, torch.tensor([0, 0, 1, 1])), batch_size=4)
        >>> source = EmbeddingSource(embed="encoder")
        >>> monitor = TrainingDynamicsMonitor(every_n_steps=1, shots=1, source=source)
        >>> options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        >>> trainer = Trainer(max_steps=1, callbacks=[monitor], accelerator="cpu", enable_model_summary=False, **options)
        >>> trainer.fit(Model(), loader)
        >>> {key: round(trainer.callback_metrics[key].item(), 4) for key in ("dynamics/alpha", "dynamics/norm_ratio")}
        {'dynamics/alpha': 2.0, 'dynamics/norm_ratio': 0.0}

    Args:
        every_n_steps: Measure one update of the weights in this number, at least 1; the paper uses 100. Choose a
            multiple of the Trainer's `log_every_n_steps`, so that loggers write fresh values.
        shots: Number of support items per class in the episode, which are the first items of each class in the batch.
            By default the module's attribute `shots`.
        episodes_per_batch: Number of consecutive episodes in a batch. By default the module's attribute of that name,
            or 1.
        source: Two keys of the mapping that the step returns, for embeddings and labels; or an `EmbeddingSource`, which
            names the labels in the batch, and with `embed` how a batch is embedded. By default the module itself is
            called with the batch's inputs. If the step returns embeddings, the first ones are compared with the
            monitor's embeddings.
        centering: `"points"` subtracts the mean embedding, as in the paper. `"coordinates"` subtracts from each
            embedding the mean of its own coordinates, as in the authors' published program.
        prefix: First part of the logged keys. A second monitor in one Trainer needs another prefix and another file.
        file: Where the history is written as JSON, for `compare_dynamics` and `fewshot compare`: a name in the folder
            of the Trainer's logger, or an absolute path. Without a logger, a name is not written. The file is written
            at the end of each epoch and of the run. At an absolute path it replaces any file. In the folder of the
            logger it replaces only a file of this run, or of the run that this one resumes; otherwise it gets the next
            free name, such as `training_dynamics-2.json`, with a warning. None writes no file.
        strict: Which errors end the run. None: only a mistake in the settings or in the output of a step does, at the
            first measured step. Any other error, such as NaN in one batch, becomes a warning, and the values are NaN.
            True: every error ends the run. False: none does.

    Attributes:
        history: The measured steps, a `DynamicsHistory`. Checkpoints contain it, and a resumed run continues it.

    Raises:
        ValueError: If a setting is out of range.

    References:
        Kim, Parviainen, Malde, "Distance-Ratio-Based Formulation for Metric Learning", section 3.1 and appendix C.
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
        # number of batches with an optimiser step, in all epochs
        self._updates = 0
        # numbers of batches in this epoch: all, and those with an optimiser step
        self._batches = 0
        self._stepping_batches = 0
        # number of optimiser steps of this batch, and whether they are measured
        self._steps = 0
        self._is_due = False

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint, unique to each monitor."""
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
                    "Two TrainingDynamicsMonitors in one Trainer would log the same keys or write the same file. Give one "
                    "of them another prefix=... and another file=...."
                )
        # A checkpoint is read after this hook. A second fit with the same Trainer keeps counting steps, and keeps the
        # history.
        if stage == "fit" and trainer.global_step == 0:
            self._history = {}
            self._resumed = DynamicsHistory()
            self._path = None
            self._is_uploaded = False
            self._updates = 0
            self._meter.is_compared = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the sizes of the episodes, and that the module has the submodule of `embed`.

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
        """Keep the batch until its end, when it is known whether the optimiser has stepped."""
        self._is_due = False
        self._steps = 0
        self._meter.start(batch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Embed the episode before the first step of this batch."""
        self._steps += 1
        self._is_due = (self._updates + 1) % self.every_n_steps == 0
        # Several steps of one batch are measured together.
        if self._is_due and self._steps == 1:
            with self._policy.handling("dynamics are NaN."):
                # Each update has two seeds: the second one shows whether the forward pass is random.
                self._meter.embed_before(trainer, pl_module, seed=2 * self._updates)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Embed the episode with the new weights, and log the measures."""
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
        """Write the history. Warn if Lightning has seen no optimiser step in the epoch."""
        self._write(trainer)
        # An epoch with fewer batches than one step accumulates may have no step.
        if self._batches >= max(1, trainer.accumulate_grad_batches) and self._stepping_batches == 0:
            fact = (
                f"Lightning reported no optimiser step in {self._batches} batches, so nothing could be measured. With "
                "manual optimisation, step through Lightning's wrapper: self.optimizers().step()."
            )
            self._policy.handle(ValueError(fact), "There are no dynamics.")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Drop the batch, and write the history of the interrupted epoch."""
        self.teardown(trainer, pl_module, "")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop the batch, and write the history, even of an interrupted epoch."""
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
                f"{self._policy.owner}: the checkpoint's training dynamics were centred by {history.centering!r}, but this "
                f"monitor centres by {self.centering!r}, so the history starts anew. Pass "
                f"centering={history.centering!r} to continue it."
            )
            return
        self._history = dict(history)
        self._resumed = history

    def _write(self, trainer: Trainer) -> None:
        """Write the history on the first rank: to the folder of the first logger, or to an absolute path."""
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
        """Upload the history, unless the file there is not an earlier part of it."""
        with (
            self._policy.handling(f"The training dynamics could not be written to {address}."),
            TemporaryDirectory() as folder,
        ):
            path = Path(folder) / posixpath.basename(address)
            self.history.save(path)
            upload(path, address, lambda file: self._is_uploaded or is_earlier_part(file, self._resumed))
            self._is_uploaded = True

    def _path_in_run(self, path: Path) -> Path:
        """Return `path`, or the next free name if that file is not an earlier part of this history."""
        free = free_path(path, lambda file: is_earlier_part(file, self._resumed))
        if free != path:
            fact = f"{type(self).__name__}: {path} was not written by this run and is left unchanged."
            self._policy.warn(f"{fact} The training dynamics are in {free.name} in the same folder.")
        return free
