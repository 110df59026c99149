"""`EmbeddingReader`: finds and checks the embeddings and labels of a step."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fewshot_callbacks.callbacks._batch_entries import are_views, entry_of_labels, is_pair
from fewshot_callbacks.callbacks._capture import Capture
from fewshot_callbacks.callbacks._conduct import UsageError, describe, without_owner
from fewshot_callbacks.callbacks._label_reader import LabelReader
from fewshot_callbacks.callbacks.embedding_source import FUNCTION, STEP_KEYS, EmbeddingSource
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import Labels, join
from fewshot_callbacks.functional._reading import as_floats, as_tensor, refuse_without_values
from fewshot_callbacks.system.words import counted
from fewshot_callbacks.trainer.lightning import LightningModule

TRAINING_STEP = "training_step"

COMPILED = (
    " If it was compiled before this monitor added its hook, the compiled code ignores the hook: return the embeddings from "
    "the step, or call torch.compiler.reset() before the run."
)

# number of dimensions of wrong embeddings -> the fix
SHAPE_FIXES = {
    1: "Has a squeeze() dropped a dimension? If each item is one number, pass embeddings[:, None].",
    3: "Pool the positions of an item: embeddings.mean(dim=1) or embeddings[:, 0]. Or flatten them: embeddings.flatten(1).",
    4: "This is a feature map: name the pooling layer that follows it, such as source='backbone.avgpool'. Or pool it: "
    "{pooled}. Or flatten it: embeddings.flatten(1).",
}


def check_submodule(module: LightningModule, name: str, call: str, fix: str = "") -> None:
    """Check that the module has a submodule of this name."""
    # A layer may have two names. The module itself has an empty name.
    names = [submodule_name for submodule_name, _ in module.named_modules(remove_duplicate=False) if submodule_name]
    if name not in names:
        top_level = [submodule_name for submodule_name in names if "." not in submodule_name]
        suggestions = difflib.get_close_matches(name, names, n=3) or top_level[:8]
        raise UsageError(
            f"{call}: {type(module).__name__} has no such submodule. It has, for instance, "
            f"{', '.join(suggestions)}.{fix}"
        )


class EmbeddingReader:
    """Reads the embeddings and labels of each step.

    If the source is a submodule, the reader owns a `Capture` of its outputs, from `start_capture` until `read` or
    `stop_capture`.

    Args:
        needs_labels: If False, a step without labels has an empty `Labels`.
    """

    def __init__(
        self, source: EmbeddingSource, owner: str, *, needs_labels: bool = True, labels: LabelReader | None = None
    ) -> None:
        self.source = source
        self.labels = labels or LabelReader()
        self.owner = owner
        self.needs_labels = needs_labels
        # keys of the step's output; the second is also the key of the labels in a batch
        self.keys = source.source if isinstance(source.source, tuple) else STEP_KEYS
        self._is_compiled = False
        self._may_skip_batches = False
        # steps that have given embeddings in this run; if one gives none later, the next batch may have them again
        self.successful_steps: set[str] = set()
        self.capture = Capture(source.kept_output)

        # end of messages about a training step without embeddings or labels, which the owner sets
        self.without_training = ""

    def begin(self) -> None:
        """Begin a run, in which no step has given embeddings."""
        self.detach()
        self.successful_steps.clear()

    def attach(self, module: LightningModule) -> None:
        """Find the submodule that is the source. A compiled module gets its hook now, any other before each step.

        The module may replace its layers in `setup` and `configure_model`, which run after the `setup` of callbacks.
        """
        self._is_compiled = _is_compiled(module)
        self._may_skip_batches = module.automatic_optimization
        name = self.source.submodule
        if not name:
            return
        call = f"{self.owner}(source={self.source.source!r})"
        check_submodule(
            module, name, call, " If you mean keys of the step's output, pass two: source=('embeddings', 'labels')."
        )
        try:
            self.capture.attach(module, name, is_compiled=self._is_compiled)
        except RuntimeError as error:
            if not isinstance(module.get_submodule(name), torch.jit.ScriptModule):
                raise
            raise UsageError(
                f"{call}: TorchScript has compiled this submodule, so it runs no hooks that could read its output. "
                f"Return the embeddings from the steps.{self._embed_fix()}"
            ) from error

    def detach(self) -> None:
        """Remove the hook, and drop the captured outputs."""
        self.capture.detach()

    def _embed_fix(self) -> str:
        """Return the end of a message: how to let a monitor embed batches itself."""
        if "." in self.source.submodule:
            # It is inside another submodule, and may not take the inputs of a batch.
            fix = self.source.as_argument(source=None, embed=FUNCTION)
            return f" Or pass a function of (module, batch) that returns the embeddings: {fix}."
        fix = self.source.as_argument(source=None, embed=self.source.source)
        return f" Or let {self.owner} embed the batches itself: {fix}."

    def start_capture(self) -> None:
        """Begin a step, and capture the submodule's output from now on."""
        self.capture.start()

    def stop_capture(self) -> None:
        """End the step: drop the captured outputs, and stop capturing."""
        self.capture.stop()

    def read(self, outputs: Any, batch: Any, step: str) -> tuple[Tensor, Labels]:
        """Return embeddings (items, dim) and labels (items,) of the step that has just ended, detached, on its device."""
        try:
            embeddings, labels = self.check(*self._find(outputs, batch, step), step)
        except UsageError as error:
            # A training step may return None to skip its batch. Lightning turns None into an empty mapping.
            is_empty = isinstance(outputs, Mapping) and not outputs
            is_skipped = self._may_skip_batches and step == TRAINING_STEP and is_empty
            if step in self.successful_steps or is_skipped:
                raise InputError(str(error)) from error
            raise
        finally:
            # Even after an error: later outputs of the submodule do not belong to a step.
            self.stop_capture()
        # An evaluation step must succeed on all ranks, which its monitor knows only at the end of the epoch.
        if step == TRAINING_STEP:
            self.successful_steps.add(step)
        return embeddings, labels

    def _find(self, outputs: Any, batch: Any, step: str) -> tuple[Any, Any]:
        """Return embeddings and labels as they are, of any type."""
        source = self.source.source
        if callable(source):
            return _call_source(source, outputs, batch, step, self.owner)
        if isinstance(source, tuple):
            if not (isinstance(outputs, Mapping) and self.keys[0] in outputs):
                raise _no_embeddings(self, outputs, step)
            return outputs[self.keys[0]], self.find_labels(outputs, batch, step)
        labels = self.find_labels(outputs, batch, step)
        items = None if labels is None else len(labels)
        hint = self._embed_fix()
        if self._is_compiled:
            hint += COMPILED
        return self.source.join_calls(self.capture.calls, items, step, self.owner, hint), labels

    def find_labels(self, outputs: Any, batch: Any, step: str) -> Any:
        """Return the unchanged labels of a batch; None without labels, if the owner needs none.

        The entry that the user names comes first, then the step's output, and the batch last: the labels that a step
        returns may differ from the labels in the batch (views of items, mixed images). `outputs` is None without a
        step.
        """
        key = self.keys[1]
        labels: Any = self.source.labels
        if callable(labels):
            return labels(batch)
        if labels is not None:
            try:
                return batch[labels]
            except (KeyError, IndexError, TypeError) as error:
                fix = self.source.as_argument(labels=entry_of_labels(batch, self.source.ids))
                raise UsageError(
                    f"{self.owner}, {self.source.but_for()}: the batch is {describe(batch)} and has no entry {labels!r}. "
                    f"Name an existing entry, {fix}, or pass a function of the batch."
                ) from error
        for part in (outputs, batch):
            if isinstance(part, Mapping) and key in part:
                return part[key]
        if is_pair(batch) and not are_views(*batch):
            return batch[1]
        if not self.needs_labels:
            return None
        raise self.no_labels(batch, step)

    def no_labels(self, batch: Any, step: str, owner: str = "") -> UsageError:
        """Return the error that a step has no labels: where the reader looked, and how to name their place."""
        description = "two tensors of one shape, such as two views of each item" if is_pair(batch) else describe(batch)
        fix = self.source.as_argument(labels=entry_of_labels(batch, self.source.ids))
        return UsageError(
            f"{owner or self.owner} found no labels: {step} returned none under {self.keys[1]!r}, and the batch is "
            f"{description}. Name their place in the batch: {fix}, or pass a function of the batch as labels."
            + (self.without_training if step == TRAINING_STEP else "")
        )

    def check(self, embeddings: Any, labels: Any, step: str) -> tuple[Tensor, Labels]:
        """Return the embeddings of `step`, checked and detached, and one label for each. *Collective* for a DTensor.

        Raises:
            UsageError: If types, shapes or numbers are wrong.
            ValueError: If a tensor has no values. The next batch may have some.
        """
        embeddings = _whole(embeddings, step, self.owner)
        if labels is None and not self.needs_labels:
            no_labels = Labels(torch.empty(0, dtype=torch.int64, device="cpu"))
            return _check_embeddings(embeddings, step, self.owner).detach(), no_labels
        for name, value in (("embeddings", embeddings), ("labels", labels)):
            if isinstance(value, Tensor):
                refuse_without_values(value, name, f"{self.owner}, {step}")
        try:
            item_labels = self.labels.read(labels, step, self.owner)
        except UsageError:
            raise
        except ValueError as error:
            fault = without_owner(error, self.owner)
            raise UsageError(f"{self.owner}: the labels of {step} are {describe(labels)}. {fault}") from error
        embeddings = _check_embeddings(embeddings, step, self.owner)
        views = self.source.views
        if views > 1 and len(embeddings) == views * len(item_labels):
            item_labels = join(self.owner, [item_labels] * views)
        if len(item_labels) != len(embeddings):
            raise UsageError(
                f"{self.owner}: {step} gave {counted(len(embeddings), 'embedding')}, but "
                f"{counted(len(item_labels), 'label')}. Give one label for each embedding, in the same order."
            )
        return embeddings.detach(), item_labels


def _no_embeddings(reader: EmbeddingReader, outputs: Any, step: str) -> UsageError:
    """Return the error that a step returned no embeddings, with what it returned and the fix."""
    key, labels_key = reader.keys
    similar_key = _similar_key(key, outputs)
    if similar_key is not None:
        fix = f"Did you mean source=({similar_key!r}, {_similar_key(labels_key, outputs) or labels_key!r})?"
    else:
        fix = (
            f'Return {{"loss": loss, "{key}": embeddings, "{labels_key}": labels}} from it, or name their place: '
            "source=('other', 'keys'), source=lambda outputs, batch: (embeddings, labels), or a submodule that returns the "
            "embedding: source='name.of.a.submodule'."
        )
        if step == TRAINING_STEP:
            fix += reader.without_training
    fact = f"{step} returned {describe(outputs)}; expected {key!r}"
    return UsageError(f"{reader.owner} found no embeddings: {fact}. {fix}")


def _call_source(source: Callable[[Any, Any], Any], outputs: Any, batch: Any, step: str, owner: str) -> tuple[Any, Any]:
    """Return what the user's function finds as embeddings and labels of a step."""
    try:
        result = source(outputs, batch)
    except Exception as error:
        raise UsageError(
            f"{owner}: the function passed as source raised {type(error).__name__}: {error}. {step} returned "
            f"{describe(outputs)}, and the batch is {describe(batch)}."
        ) from error
    if not (isinstance(result, Sequence) and len(result) == 2):
        raise UsageError(
            f"{owner}: the function passed as source returned {describe(result)}. It must return (embeddings, labels)."
        )
    return result[0], result[1]


def _whole(embeddings: Any, step: str, owner: str) -> Any:
    """Return a DTensor as a whole tensor, and anything else unchanged. *Collective* for a DTensor."""
    if not hasattr(embeddings, "full_tensor"):
        return embeddings
    if any(placement.is_shard(dim=0) for placement in embeddings.placements):
        raise UsageError(
            f"{owner}: the embeddings of {step} are a DTensor whose items are divided among processes, "
            f"{embeddings.placements}. Each process returns its own items: pass embeddings.to_local()."
        )
    return embeddings.full_tensor()


def _check_embeddings(embeddings: Any, step: str, owner: str) -> Tensor:
    """Return embeddings as one floating-point vector for each item, (items, dim); refuse others."""
    if not isinstance(embeddings, Tensor):
        try:
            embeddings = as_tensor(embeddings, "embeddings", owner)
        except ValueError as error:
            fact = f"{owner}: the embeddings of {step} are {describe(embeddings)}, not a tensor."
            raise UsageError(f"{fact} {without_owner(error, owner)}") from error
    if embeddings.ndim > 2 and embeddings.shape[2:].numel() == 1:  # (items, dim, 1, 1) after global pooling
        embeddings = embeddings.flatten(1)
    if embeddings.ndim != 2 or not embeddings.is_floating_point():
        fix = SHAPE_FIXES.get(embeddings.ndim, "Flatten what belongs to one item: embeddings.flatten(1).")
        if embeddings.ndim == 4:
            fix = fix.format(pooled=_mean_over_places(embeddings.shape))
        elif embeddings.ndim == 2:
            fix = as_floats("embeddings", embeddings.dtype)
        raise UsageError(
            f"{owner}: the embeddings of {step} are {describe(embeddings)}. They must be one floating-point vector "
            f"for each item, (items, dim). {fix}"
        )
    return cast(Tensor, embeddings)


def _mean_over_places(shape: Sequence[int]) -> str:
    """Return the code of the mean over the places of a feature map.

    Channels are first or, as in Swin, last: most maps are square, so two equal sizes show which.
    """
    channels_first = "embeddings.mean(dim=(2, 3))"
    channels_last = "embeddings.mean(dim=(1, 2))"
    if shape[2] == shape[3] != shape[1]:
        return channels_first
    if shape[1] == shape[2] != shape[3]:
        return channels_last
    return f"{channels_first} if the channels come first, {channels_last} if they come last"


def _similar_key(key: str, outputs: Any) -> str | None:
    """Return the key of a step's output that equals `key` or resembles it; None without one."""
    names = [name for name in outputs if isinstance(name, str)] if isinstance(outputs, Mapping) else []
    prefixes = [name for name in names if name.startswith(key) or key.startswith(name)]
    candidates = difflib.get_close_matches(key, names, n=1) or prefixes
    return candidates[0] if candidates else None


def _is_compiled(module: LightningModule) -> bool:
    """Return whether the module or a submodule was compiled."""
    if getattr(module, "_compiler_ctx", None) is not None:  # Lightning sets it when it unpacks a compiled module
        return True
    # `torch.compile(module)` wraps a module, and `module.compile()` marks it. PyTorch has no public query for either.
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules())
