"""Reads the embeddings of a step: from its output, from a function of it, or from the output of a submodule."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fewshot_callbacks.callbacks._conduct import UsageError, check_at_least
from fewshot_callbacks.functional._labels import Labels, as_labels, join
from fewshot_callbacks.functional._reading import as_tensor, refuse_without_values
from fewshot_callbacks.metrics.embedding_store import read_ids

# `("embeddings", "labels")`: keys of the mapping that the step returns. `"encoder.head"`: the output of that submodule, or
# `"encoder:pooler_output"` what its output holds under that name. A function of (outputs, batch): (embeddings, labels).
Source = str | tuple[str, str] | Callable[[Any, Any], tuple[Any, Any]]

LabelSource = str | int | Callable[[Any], Any]
"""Where the labels, integers or strings, are in a batch: a key, a position, or a function of the batch."""

# With two encoders also two entries, one for each side.
LabelSources = LabelSource | tuple[str, str]

# An entry of the step's output or of the batch, by its key; its position in the batch; or a function of (outputs, batch).
Entry = str | int | Callable[[Any, Any], Any]

STEP_KEYS = ("embeddings", "labels")
TRAINING_STEP = "training_step"

COMPILED = (
    " Or it was compiled before this monitor added its hook, and compiled code ignores hooks: return the embeddings from "
    "the step, or call torch.compiler.reset() before the run."
)

# The fix for embeddings of each number of dimensions other than two.
SHAPE_FIXES = {
    1: "Has a squeeze() dropped a dimension? For items of one number each: embeddings[:, None].",
    2: "Pass embeddings.float().",
    3: "Pool the positions of an item: embeddings.mean(dim=1) or embeddings[:, 0]; or flatten them: embeddings.flatten(1).",
    4: "This is a feature map: name the pooling layer that follows it, such as source='backbone.avgpool', or pool it with "
    "{pooled}; or flatten it: embeddings.flatten(1).",
}

_HOOKS_IGNORED: ContextVar[bool] = ContextVar("hooks_ignored", default=False)


@contextmanager
def hooks_ignored() -> Iterator[None]:
    """Ignore what submodules return inside the block: it belongs to no step, and no `EmbeddingReader` keeps it."""
    token = _HOOKS_IGNORED.set(True)
    try:
        yield
    finally:
        _HOOKS_IGNORED.reset(token)


def check_submodule(module: LightningModule, name: str, call: str, fix: str = "") -> None:
    """See that there is the submodule that is named.

    Raises:
        UsageError: If not; with the names that are near.
    """
    names = [each for each, _ in module.named_modules(remove_duplicate=False) if each]  # a layer may have two names
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3) or [each for each in names if "." not in each][:8]
        raise UsageError(
            f"{call}: {type(module).__name__} has no submodule of that name. It has, for instance, {', '.join(near)}.{fix}"
        )


class EmbeddingSource:
    """Where the embeddings and labels of each step come from; several monitors can share one object.

    Args:
        source: Two keys of the mapping that the step returns; or the name of a submodule whose output is the embedding,
            with a path after a colon where the output is an object or a mapping that holds it (`"encoder:pooler_output"`,
            `"encoder:hidden_states.0"`); or a function of (outputs, batch) that returns (embeddings, labels).
        labels: Where the labels are in the batch, if the step does not return them: a key, a position, or a function of
            the batch.
        views: Number of embeddings that a step may make of each item, at least 1 (2 for SimCLR): all items in the first
            view, then all in the next, in one call of the submodule or in several. The labels are repeated accordingly.
            A step that makes one embedding of each item, such as a validation step, is read as usual.

    Raises:
        ValueError: If the source is none of these, or `views` is less than 1.

    Examples:
        >>> from fewshot_callbacks import DiscriminantRatioMonitor, RetrievalMonitor
        >>> source = EmbeddingSource("encoder", labels="species", views=2)
        >>> monitors = [DiscriminantRatioMonitor(source=source), RetrievalMonitor(source=source)]
    """

    def __init__(self, source: Source = STEP_KEYS, *, labels: LabelSource | None = None, views: int = 1) -> None:
        self.where = _checked_source(source, "EmbeddingSource")
        check_at_least(1, "EmbeddingSource", views=views)
        self.labels, self.views = labels, views
        self.submodule, _, self.path = self.where.partition(":") if isinstance(self.where, str) else ("", "", "")

    def joined(self, captured: Sequence[Any] | None, items: int | None, step: str, owner: str, hint: str) -> Tensor:
        """Join the embeddings that the submodule gave in a step.

        Args:
            captured: What it returned, call by call.
            items: Number of labels; None without labels, which nothing is then compared with.
            step: Name of the step, for messages.
            owner: Name of the callback, for messages.
            hint: What else may be the cause where the submodule was not called.

        Raises:
            UsageError: If it was not called, gave no tensor, or as many rows as fit neither the labels nor the views.
        """
        if not captured:
            raise UsageError(
                f"{owner}: {step} did not call the submodule {self.submodule!r}, so there are no embeddings. Name one "
                f"that this step calls as a function: {self.submodule}(x), since {self.submodule}.forward(x) runs no "
                f"hooks.{hint}"
            )
        outputs = [follow(output, self.path, f"{owner}(source={self.where!r})") for output in captured]
        for output in outputs:
            if not isinstance(output, Tensor):
                raise UsageError(
                    f"{owner}: the submodule {self.where!r} returns {describe(output)}, not a tensor. Name the entry that "
                    f"is the embedding, such as source='{self.submodule}:pooler_output', or pass "
                    "source=lambda outputs, batch: (embeddings, labels)."
                )
        rows = [len(output) for output in outputs]
        if items is not None and len(outputs) > 1 and sum(rows) not in (items, self.views * items):
            split = f"source=EmbeddingSource({self.where!r}, views={len(rows)})"
            raise UsageError(
                f"{owner}: {step} called the submodule {self.submodule!r} {len(rows)} times, with "
                f"{', '.join(map(str, rows))} rows, for {items} labels. Pass "
                f"source=lambda outputs, batch: (embeddings, labels) to say which are meant."
                + (f" For {len(rows)} views of each item pass {split}." if set(rows) == {items} else "")
            )
        return torch.cat(outputs).detach() if len(outputs) > 1 else outputs[0].detach()


def follow(value: Any, path: str, where: str) -> Any:
    """Follow a dotted path of keys, positions and attributes; an empty path leads to the value itself.

    Raises:
        UsageError: If there is no such entry.
    """
    for name in path.split(".") if path else ():
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, Sequence) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif not isinstance(value, Mapping) and hasattr(value, name):
            value = getattr(value, name)
        else:
            raise UsageError(f"{where}: there is {describe(value)}, which has no entry {name!r}. Name one that it has.")
    return value


def _checked_source(source: Any, owner: str) -> Source:
    """Bring a source into one form: a tuple of two keys, a name, or a function."""
    if isinstance(source, Sequence) and not isinstance(source, str):
        if len(source) != 2 or not all(isinstance(key, str) for key in source):
            raise ValueError(f"{owner}(source={source!r}): two keys are needed, such as ('embeddings', 'labels').")
        return (source[0], source[1])  # a configuration file gives a list
    if not isinstance(source, str) and not callable(source):
        raise ValueError(
            f"{owner}(source={source!r}) is none of: two keys of the step's output, the name of a submodule, a "
            "function of (outputs, batch)."
        )
    checked: Source = source
    return checked


class EmbeddingReader:
    """Reads (embeddings, labels) of each step.

    Args:
        source: See `Source`, or an `EmbeddingSource`, which several readers can share.
        labels: See `LabelSource`; by default those of the `EmbeddingSource`, or the labels that the step returned, or else
            the second part of the batch or its entry under the name of the labels.
        owner: Name of the callback, for messages.
    """

    def __init__(self, source: Source | EmbeddingSource, labels: LabelSources | None, owner: str) -> None:
        if not isinstance(source, EmbeddingSource):
            source = EmbeddingSource(_checked_source(source, owner))
        self.shared, self.source, self.owner = source, source.where, owner
        self.keys = self.source if isinstance(self.source, tuple) else STEP_KEYS  # in outputs, and of labels in batches
        self.labels: Any = source.labels if labels is None else labels
        # an owner that takes multi-label targets, too, has a function of its own
        self.read_labels: Callable[[Any, str], Labels] = self._one_label_each
        self.needs_labels = True  # an owner that can do without them reads an empty `Labels` where there are none
        self.without_training = ""  # what the owner can do where a training step gives no embeddings or labels
        self.can_embed = False  # the owner has an argument `embed`, for batches of which no step gives the embeddings
        self._is_compiled, self._may_skip = False, False
        self.worked: set[str] = set()  # steps that have given embeddings: a missing one may heal in this run
        self._heard: nn.Module | None = None  # the submodule that is listened to
        self._handle: RemovableHandle | None = None
        self._captured: list[Any] | None = None

    def begin(self) -> None:
        """Begin a run, of which no step has given embeddings."""
        self.detach()
        self.worked.clear()

    def listen(self, module: LightningModule) -> None:
        """Listen to the submodule that is the source; do nothing if that is so already.

        The module may make or replace its layers in `setup` and in `configure_model`, which both come after the `setup` of
        the callbacks.

        Raises:
            UsageError: If there is no submodule of that name, or it runs no hooks.
        """
        self._is_compiled, self._may_skip = _is_compiled(module), module.automatic_optimization
        name = self.shared.submodule
        if not name:
            return
        call = f"{self.owner}(source={self.source!r})"
        check_submodule(module, name, call, " For keys of the step's output pass two: source=('embeddings', 'labels').")
        submodule = module.get_submodule(name)
        if submodule is self._heard:
            return
        self.detach()
        try:
            self._handle = submodule.register_forward_hook(self._capture)
        except RuntimeError as error:
            if not isinstance(submodule, torch.jit.ScriptModule):
                raise
            raise UsageError(
                f"{call}: TorchScript has compiled this submodule, and runs no hooks that could read its output. Return "
                f"the embeddings from the steps.{self._embed_fix()}"
            ) from error
        self._heard = submodule

    def detach(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._captured = self._heard = None

    def _embed_fix(self) -> str:
        """Say how the owner embeds batches itself, if it can."""
        whole = self.shared.submodule.partition(".")[0]
        return f" Or let {self.owner} embed the batches itself: embed={whole!r}." if self.can_embed else ""

    def _one_label_each(self, labels: Any, step: str) -> Labels:
        return as_labels(labels, "labels", self.owner)

    def expect(self) -> None:
        """Begin a step: keep what the submodule returns from now on."""
        self._captured = []

    def dismiss(self) -> None:
        """End the step: do not keep what the submodule returns from now on."""
        self._captured = None

    def _capture(self, _module: Any, _inputs: Any, output: Any) -> None:
        if self._captured is not None and not _HOOKS_IGNORED.get():
            # Detached at once: a graph that is kept would keep all activations of the step.
            self._captured.append(output.detach() if isinstance(output, Tensor) else output)

    def read(self, outputs: Any, batch: Any, step: str) -> tuple[Tensor, Labels]:
        """Read embeddings (items, dim) and labels (items,) of the step that has just ended, detached, on its device.

        Args:
            outputs: What the step returned.
            batch: What it was given.
            step: Name of the step, for messages.

        Raises:
            UsageError: If they are not where the source says; names what was there and the argument that fixes it.
            ValueError: The same, where this step has given embeddings before, or may have skipped a batch: it may heal.
        """
        try:
            found = self.checked(*self._found(outputs, batch, step), step)
        except UsageError as error:
            # A training step may return None to skip its batch, of which Lightning makes an empty mapping.
            skipped = self._may_skip and step == TRAINING_STEP and isinstance(outputs, Mapping) and not outputs
            if step in self.worked or skipped:
                raise ValueError(str(error)) from error
            raise
        finally:  # always stop capturing: the output of later calls is not read
            self.dismiss()
        if step == TRAINING_STEP:
            self.worked.add(step)
        return found

    def _found(self, outputs: Any, batch: Any, step: str) -> tuple[Any, Any]:
        """Find embeddings and labels, of any type."""
        if callable(self.source):
            return _called(self.source, outputs, batch, step, self.owner)
        if isinstance(self.source, tuple):
            if not (isinstance(outputs, Mapping) and self.keys[0] in outputs):
                raise _no_embeddings(self, outputs, step)
            return outputs[self.keys[0]], self.labels_of(outputs, batch, step)
        labels = self.labels_of(outputs, batch, step)
        items, hint = None if labels is None else len(labels), self._embed_fix() + COMPILED * self._is_compiled
        return self.shared.joined(self._captured, items, step, self.owner, hint), labels

    def labels_of(self, outputs: Any, batch: Any, step: str) -> Any:
        """Find the labels of a batch; `outputs` is None if no step has processed it."""
        key = self.keys[1]
        # What the user has said comes first, then what the step has returned, whose labels need not be those of the
        # batch (views of items, mixed images), and only then the batch.
        if callable(self.labels):
            return self.labels(batch)
        if self.labels is not None:
            try:
                return batch[self.labels]
            except (KeyError, IndexError, TypeError) as error:
                raise UsageError(
                    f"{self.owner}(labels={self.labels!r}): the batch is {describe(batch)} and has no such entry. "
                    "Pass a key or a position that it has, or a function of the batch."
                ) from error
        for part in (outputs, batch):
            if isinstance(part, Mapping) and key in part:
                return part[key]
        is_pair = isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2
        if is_pair and not _are_views(*batch):
            return batch[1]
        if not self.needs_labels:
            return None
        what = "two tensors of one shape, such as two views of each item" if is_pair else describe(batch)
        raise UsageError(
            f"{self.owner} found no labels: {step} returned none under {key!r}, and the batch is {what}. "
            f"Say where they are in the batch: {self.owner}(labels='key'), labels=1 for a position, or a function of it."
            + (self.without_training if step == TRAINING_STEP else "")
        )

    def checked(self, embeddings: Any, labels: Any, step: str) -> tuple[Tensor, Labels]:
        """Check embeddings and labels of `step`, and detach them."""
        if labels is None and not self.needs_labels:
            return _rows(embeddings, step, self.owner).detach(), Labels(torch.empty(0, dtype=torch.int64, device="cpu"))
        for name, value in (("embeddings", embeddings), ("labels", labels)):
            if isinstance(value, Tensor):  # not a mistake of the settings: another batch may have values
                refuse_without_values(value, name, f"{self.owner}, {step}")
        try:
            read = self.read_labels(labels, step)
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(f"{self.owner}: the labels of {step} are {describe(labels)}. {error}") from error
        rows = _rows(embeddings, step, self.owner)
        if self.shared.views > 1 and len(rows) == self.shared.views * len(read):
            read = join(self.owner, [read] * self.shared.views)
        if len(read) != len(rows):
            raise UsageError(
                f"{self.owner}: {step} gave {len(rows)} embeddings, but {len(read)} labels; expected one for each "
                "embedding, in the same order."
            )
        return rows.detach(), read


def _no_embeddings(reader: EmbeddingReader, outputs: Any, step: str) -> UsageError:
    """Say what a step returned in place of embeddings, and the argument that fixes it."""
    key, labels_key = reader.keys
    near, given = _near_key(key, outputs), _near_key(labels_key, outputs) or labels_key
    fix = f"Did you mean source=({near!r}, {given!r})?"
    if near is None:
        fix = (
            f'Return {{"loss": loss, "{key}": embeddings, "{labels_key}": labels}} from it, or say where they are: '
            "source=('other', 'keys'), source=lambda outputs, batch: (embeddings, labels), or "
            "source='name.of.a.submodule' whose output is the embedding."
        ) + (reader.without_training if step == TRAINING_STEP else "")
    said = f"{step} returned {describe(outputs)}; expected {key!r}"
    return UsageError(f"{reader.owner} found no embeddings: {said}. {fix}")


def _called(source: Callable[[Any, Any], Any], outputs: Any, batch: Any, step: str, owner: str) -> tuple[Any, Any]:
    """Call a function that is the source of a step's embeddings and labels."""
    try:
        result = source(outputs, batch)
    except Exception as error:
        raise UsageError(
            f"{owner}: the function passed as source raised {type(error).__name__}: {error}. {step} returned "
            f"{describe(outputs)}, and the batch is {describe(batch)}."
        ) from error
    if not (isinstance(result, Sequence) and len(result) == 2):
        raise UsageError(
            f"{owner}: the function passed as source returned {describe(result)}; it must return (embeddings, labels)."
        )
    return result[0], result[1]


def _rows(embeddings: Any, step: str, owner: str) -> Tensor:
    """Check that the embeddings are one vector of floats for each item."""
    if not isinstance(embeddings, Tensor):
        try:
            embeddings = as_tensor(embeddings, "embeddings", owner)
        except ValueError as error:
            what = f"{owner}: the embeddings of {step} are {describe(embeddings)}, not a tensor."
            raise UsageError(f"{what} {error}") from error
    if embeddings.ndim > 2 and embeddings.shape[2:].numel() == 1:  # (items, dim, 1, 1) of a global pooling layer
        embeddings = embeddings.flatten(1)
    if embeddings.ndim != 2 or not embeddings.is_floating_point():
        fix = SHAPE_FIXES.get(embeddings.ndim, "Flatten what belongs to one item: embeddings.flatten(1).")
        fix = fix.format(pooled=_pooled(embeddings.shape)) if embeddings.ndim == 4 else fix
        raise UsageError(
            f"{owner}: the embeddings of {step} are {describe(embeddings)}; expected one floating-point vector for each "
            f"item, (items, dim). {fix}"
        )
    rows: Tensor = embeddings
    return rows


def _pooled(shape: Sequence[int]) -> str:
    """Write the mean over the places of a feature map, whose channels come first or, as in Swin, last."""
    first, last = "embeddings.mean(dim=(2, 3))", "embeddings.mean(dim=(1, 2))"
    # Most maps are square.
    if shape[2] == shape[3] != shape[1]:
        return first
    if shape[1] == shape[2] != shape[3]:
        return last
    return f"{first} where the channels come first, {last} where they come last"


def read_flag(where: Entry, outputs: Any, batch: Any, items: int, owner: str, views: int = 1, hint: str = "") -> Tensor:
    """Read the mask of the embeddings of a batch that belong to the gallery, (items,) on the CPU.

    With several views of each item, the mask may hold one entry for each item.
    """
    flag = read_entry("gallery", where, outputs, batch, owner, hint)
    if isinstance(flag, np.ndarray | list) and all(isinstance(entry, bool | np.bool_) for entry in flag):
        flag = torch.tensor(flag, dtype=torch.bool, device="cpu")
    if not isinstance(flag, Tensor) or flag.ndim != 1:
        raise UsageError(f"{owner}: gallery gave {describe(flag)}; expected one boolean for each item.")
    mask = flag.detach().cpu().bool()
    if len(mask) * views == items:
        mask = mask.repeat(views)
    if len(mask) != items:
        raise UsageError(
            f"{owner}: gallery has {len(mask)} entries for {items} embeddings. Expected one boolean for each item."
        )
    return mask


def read_names(
    argument: str, where: Entry | Sequence[Entry], outputs: Any, batch: Any, items: int, owner: str, views: int = 1
) -> Labels:
    """Return an integer or a word for each embedding of a batch, on the CPU: equal where all entries are equal.

    Args:
        argument: Name of the argument, for messages.
        where: One entry, or several of which the joint value counts.
        outputs: What the step returned.
        batch: What it was given.
        items: Number of embeddings.
        owner: Name of the callback, for messages.
        views: With several of each item, there may be one value for each item, and each of its views then counts once.

    Raises:
        UsageError: If there is no such entry, or it does not hold an integer or a word for each embedding.
    """
    several = [where] if isinstance(where, str | int) or callable(where) else where
    read = [read_entry(argument, one, outputs, batch, owner) for one in several]
    values = read[0]
    if len(read) > 1:
        lists = [one.tolist() if isinstance(one, Tensor | np.ndarray) else list(one) for one in read]
        if len({*map(len, lists)}) > 1:
            raise UsageError(
                f"{owner}: the entries {several} of {argument} have {[*map(len, lists)]} values. One each."
            )
        values = [repr(joint) for joint in zip(*lists, strict=True)]
    if views > 1 and hasattr(values, "__len__") and len(values) * views == items:
        names = values.tolist() if isinstance(values, Tensor | np.ndarray) else list(values)
        values = [f"{name}, view {view}" if argument == "ids" else str(name) for view in range(views) for name in names]
    try:
        return read_ids(values, items, owner)
    except ValueError as error:
        raise UsageError(
            f"{owner}: {argument} gave {describe(values)}; expected an integer or a word for each of the {items} "
            f"embeddings. {error}"
        ) from error


def read_entry(argument: str, where: Entry, outputs: Any, batch: Any, owner: str, hint: str = "") -> Any:
    """Read an entry of the step's output or of the batch, or call a function of both."""
    if callable(where):
        return where(outputs, batch)
    if isinstance(where, int):
        try:
            return batch[where]
        except (KeyError, IndexError, TypeError) as error:
            raise UsageError(
                f"{owner}({argument}={where!r}): the batch is {describe(batch)} and has no such entry. Pass a position that "
                f"it has, a key, or a function of (outputs, batch).{hint}"
            ) from error
    holder = next((part for part in (outputs, batch) if isinstance(part, Mapping) and where in part), None)
    if holder is None:
        raise UsageError(
            f"{owner}({argument}={where!r}): neither what the step returned ({describe(outputs)}) nor the batch "
            f"({describe(batch)}) has that entry. Pass a function of (outputs, batch) that returns it.{hint}"
        )
    return holder[where]


def _near_key(key: str, outputs: Any) -> str | None:
    """Return the key of a step's output that a key is probably meant to be; the key itself, where it is one."""
    names = [name for name in outputs if isinstance(name, str)] if isinstance(outputs, Mapping) else []
    begins = [name for name in names if name.startswith(key) or key.startswith(name)]
    found = difflib.get_close_matches(key, names, n=1) or begins
    return found[0] if found else None


def _are_views(one: Any, other: Any) -> bool:
    """Check whether the two parts of a batch are inputs of one shape, and the second no labels: no targets of 0 and 1."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape and other.ndim > 1):
        return False
    return other.is_floating_point() and not are_zeros_and_ones(other)


def are_zeros_and_ones(values: Tensor) -> bool:
    """Check whether a tensor holds nothing but 0 and 1."""
    return bool(((values == 0) | (values == 1)).all())


def _is_compiled(module: LightningModule) -> bool:
    """Check whether the module or a submodule was compiled."""
    if getattr(module, "_compiler_ctx", None) is not None:  # where Lightning keeps what it unpacks
        return True
    # `torch.compile(module)` wraps a module and `module.compile()` marks it; PyTorch has no public way to ask for
    # either.
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules())


def describe(value: Any) -> str:
    """Describe a value in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    if isinstance(value, Mapping):
        return f"a mapping with the keys {', '.join(map(repr, value)) or 'none'}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
