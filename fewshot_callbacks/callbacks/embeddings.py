"""Reads the embeddings of a step: from its output, from a function of it, or from the output of a submodule.

EmbeddingSource    what the user says of it: a setting, which several monitors can be given
EmbeddingReader    finds them in a step, and checks them
read_flag, ...     other entries of the step's output or of the batch
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from os import PathLike, fspath
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fewshot_callbacks.callbacks._capture import Capture, CapturedCall
from fewshot_callbacks.callbacks._conduct import UsageError, check_at_least, describe, without_owner
from fewshot_callbacks.callbacks._label_reader import LabelReader
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import Labels, join
from fewshot_callbacks.functional._reading import as_floats, as_tensor, refuse_without_values
from fewshot_callbacks.metrics.item_batch import read_ids
from fewshot_callbacks.settings import plain_list
from fewshot_callbacks.system.words import counted
from fewshot_callbacks.trainer.lightning import LightningModule

# `("embeddings", "labels")`: keys of the mapping that the step returns. `"encoder.head"`: the output of that submodule, or
# `"encoder:pooler_output"` what its output holds under that name. A function of (outputs, batch): (embeddings, labels).
Source = str | tuple[str, str] | Callable[[Any, Any], tuple[Any, Any]]

LabelSource = str | int | Callable[[Any], Any]
"""Where the labels, integers or strings, are in a batch: a key, a position, or a function of the batch."""

# With two encoders also two entries, one for each side.
LabelSources = str | int | tuple[str, str] | Callable[[Any], Any]

# How a batch becomes embeddings outside a step: the name of a submodule that is called with the batch's inputs, if need
# be with a path in its output (`"encoder:pooler_output"`), or a function of (module, batch) that returns embeddings, or
# (embeddings, labels).
Embed = str | Callable[[LightningModule, Any], Tensor | tuple[Tensor, Any]]

# An entry of the step's output or of the batch, by its key; its position in the batch; or a function of (outputs, batch).
Entry = str | int | Callable[[Any, Any], Any]

STEP_KEYS = ("embeddings", "labels")
TRAINING_STEP = "training_step"

# Argument of an `EmbeddingSource` that somebody may pass to a monitor -> a value that it may have, and what it is.
SOURCE_ARGUMENTS = {
    "labels": ("label", "an entry of the batch"),
    "embed": ("encoder", "a submodule or a function of (module, batch)"),
    "ids": ("path", "an entry of the batch or of the step's output that names each item"),
    "views": (2, "the number of views of each item"),
    "spill_to": ("folder", "a folder on a disk"),
}

# Names under which batches usually have labels.
LABEL_NAMES = ("label", "labels", "target", "targets", "class", "classes", "y")

COMPILED = (
    " Or it was compiled before this monitor added its hook, and compiled code ignores hooks: return the embeddings from "
    "the step, or call torch.compiler.reset() before the run."
)

# Number of dimensions of wrong embeddings -> what to do about it.
SHAPE_FIXES = {
    1: "Has a squeeze() dropped a dimension? For items of one number each: embeddings[:, None].",
    3: "Pool the positions of an item: embeddings.mean(dim=1) or embeddings[:, 0]; or flatten them: embeddings.flatten(1).",
    4: "This is a feature map: name the pooling layer that follows it, such as source='backbone.avgpool', or pool it with "
    "{pooled}; or flatten it: embeddings.flatten(1).",
}


def check_submodule(module: LightningModule, name: str, call: str, fix: str = "") -> None:
    """Check that the module has a submodule of this name.

    Raises:
        UsageError: If not; lists similar names.
    """
    # Duplicates stay, since a layer may have two names; the module itself has an empty one.
    names = [submodule_name for submodule_name, _ in module.named_modules(remove_duplicate=False) if submodule_name]
    if name not in names:
        top_level = [submodule_name for submodule_name in names if "." not in submodule_name]
        suggestions = difflib.get_close_matches(name, names, n=3) or top_level[:8]
        raise UsageError(
            f"{call}: {type(module).__name__} has no submodule of that name. It has, for instance, "
            f"{', '.join(suggestions)}.{fix}"
        )


@dataclass(frozen=True)
class EmbeddingSource:
    """Where the embedding, the label and the id of each item come from.

    Monitors of one Trainer whose sources are equal share one copy of the embeddings of each validation. Two functions are
    equal only if they are the same object: give the monitors one source where it holds a function.

    Args:
        source: Two keys of the mapping that the step returns (default `("embeddings", "labels")`); or the name of a
            submodule whose output is the embedding, with a path after a colon where the output is an object or a mapping
            that holds it (`"encoder:pooler_output"`, `"encoder:hidden_states.0"`); or a function of (outputs, batch) that
            returns (embeddings, labels).
        labels: Where the labels are in the batch, if the step does not return them: a key, a position, or a function of
            the batch. By default those that the step returned, else the second part of the batch or its entry `labels`. With
            two encoders also two keys of the step's output or of the batch, one for each side.
        embed: How a batch is embedded outside any step: the name of a submodule that is called with the batch's inputs, or a
            function of (module, batch) that returns embeddings or (embeddings, labels), such as
            `lambda module, batch: module.backbone(batch[0][0]).flatten(1)` for the first view of each item. Training items
            that a monitor compares with are embedded so; by default by the submodule that `source` names, or else by the
            module itself. Without a `source`, every batch is: the steps then need not give embeddings. The module is in
            evaluation mode meanwhile, and random states are restored.
        ids: Entry of the step's output or of the batch, position in the batch, or function of (outputs, batch), with an
            integer or a string that identifies each item, such as its path; batches of a bank may have it, too. An item
            that occurs more than once is counted once, and no query finds the item of its id in a gallery or a bank; items
            of one id that differ in embedding or label are a warning. Needed if your own sampler, or the workers of an
            iterable data set, repeat samples; the samples that Lightning's `DistributedSampler` repeats to give all
            processes the same number are dropped without ids. With two encoders also two entries, one for each side:
            `("image_id", "caption_id")`.
        views: Number of embeddings that a step may make of each item, at least 1 (2 for SimCLR): all items in the first
            view, then all in the next, in one call of the submodule or in several. The labels are repeated accordingly.
            A step that makes one embedding of each item, such as a validation step, is read as usual.
        spill_to: A folder on a disk, for validation sets larger than memory: embeddings are written to a file in it, and
            read from there as they are needed. It has no name, and vanishes after the evaluation.

    Raises:
        ValueError: If the source is none of these, or `views` is less than 1.

    Examples:
        >>> from fewshot_callbacks import DiscriminantRatioMonitor, RetrievalMonitor
        >>> source = EmbeddingSource("encoder", labels="species", ids="path")
        >>> monitors = [DiscriminantRatioMonitor(source=source), RetrievalMonitor(source=source)]
    """

    source: Source | None = None
    _: KW_ONLY
    labels: LabelSources | None = None
    embed: Embed | None = None
    ids: tuple[Entry, Entry] | Entry | None = None
    views: int = 1
    spill_to: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        source = self.source
        if source is None and self.embed is None:
            source = STEP_KEYS
        # A configuration file gives lists, which are never equal to tuples.
        object.__setattr__(self, "source", None if source is None else _checked_source(source, "EmbeddingSource"))
        for name in ("labels", "ids"):
            value = plain_list(getattr(self, name))
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        if self.spill_to is not None:
            object.__setattr__(self, "spill_to", fspath(self.spill_to))
        check_at_least(1, "EmbeddingSource", views=self.views)

    @classmethod
    def of(cls, source: Any, owner: str) -> EmbeddingSource:
        """Return the source that a monitor was given, in one form.

        Raises:
            ValueError: If it is of no known form; names the monitor, `owner`.
        """
        if isinstance(source, Mapping):  # of a configuration file
            names = [field.name for field in fields(cls)]
            unknown = [str(name) for name in source if name not in names]
            if unknown:
                raise InputError(
                    f"{owner}(source={dict(source)!r}): EmbeddingSource has no argument {unknown[0]!r}. It has "
                    f"{', '.join(names)}."
                )
            return cls(**source)
        return source if isinstance(source, EmbeddingSource) else cls(_checked_source(source, owner))

    @property
    def embeds_batches(self) -> bool:
        """Whether every batch is embedded a second time, since the steps give no embeddings."""
        return self.source is None

    @property
    def submodule(self) -> str:
        """Name of the submodule whose output is the embedding; empty for other sources."""
        return self.source.partition(":")[0] if isinstance(self.source, str) else ""

    @property
    def path(self) -> str:
        """Path of the embedding in what the submodule returns; empty if that is the embedding."""
        return self.source.partition(":")[2] if isinstance(self.source, str) else ""

    def but_for(self, **changes: Any) -> str:
        """Return the call that makes this source with changes: `EmbeddingSource('encoder', labels=1)`."""
        given = {name: getattr(self, name) for name in ("source", "labels", "embed", "ids", "spill_to")}
        given["views"] = None if self.views == 1 else self.views
        arguments = given | changes
        source = arguments.pop("source")
        written = [f"{name}={as_code(value)}" for name, value in arguments.items() if value is not None]
        if source not in (None, STEP_KEYS):
            written.insert(0, as_code(source))
        return f"EmbeddingSource({', '.join(written)})"

    def as_argument(self, **changes: Any) -> str:
        """Return the argument of a monitor that gives it this source with changes: `source=('embeddings', 'labels')`."""
        call = self.but_for(**changes)
        source = changes.get("source", self.source) or STEP_KEYS
        alone = (f"EmbeddingSource({as_code(source)})", "EmbeddingSource()")
        return f"source={as_code(source)}" if call in alone else f"source={call}"

    def with_argument(self, name: str, value: Any) -> str:
        """Return the call that gives this source an argument that a monitor was given instead, and what the argument is.

        Args:
            name: One of `SOURCE_ARGUMENTS`.
            value: What the monitor was given.
        """
        example, description = SOURCE_ARGUMENTS[name]
        return f"{self.as_argument(**{name: value if is_entry(value) else example})}, {description}"

    def call_on(self, inputs: str) -> str:
        """Return the code that embeds some inputs by a `module`: `module.encoder(batch['image'])`."""
        name = self.submodule
        if not all(part.isidentifier() for part in name.split(".")) and name:
            called = f"module.get_submodule({name!r})"
        else:
            called = f"module.{name}" if name else "module"
        steps = self.path.split(".") if self.path else []
        return f"{called}({inputs})" + "".join(f"[{step}]" if step.isdecimal() else f".{step}" for step in steps)

    def join_calls(self, calls: Sequence[CapturedCall], items: int | None, step: str, owner: str, hint: str) -> Tensor:
        """Join what the submodule returned in a step to one tensor of embeddings.

        Args:
            calls: What was kept of its calls, see `kept_output`.
            items: Number of labels; None without labels: the number of rows is then not checked.
            step: Name of the step, for messages.
            owner: Name of the callback, for messages.
            hint: Another possible cause if the submodule was not called, for messages.

        Raises:
            UsageError: If it was not called, did not return tensors, or the number of rows in several calls fits neither
                the labels nor the views.
        """
        if not calls:
            raise UsageError(
                f"{owner}: {step} did not call the submodule {self.submodule!r}, so there are no embeddings. Name one "
                f"that this step calls as a function: {self.submodule}(x), since {self.submodule}.forward(x) runs no "
                f"hooks.{hint}"
            )
        outputs: list[Tensor] = []
        for call in calls:
            if not isinstance(call.value, Tensor):
                raise self._no_tensor(call.value, owner)
            outputs.append(call.value)
        if len(outputs) == 1:
            return outputs[0]
        row_counts = [len(output) for output in outputs]
        if items is not None and sum(row_counts) not in (items, self.views * items):
            raise self._too_many_calls(calls, row_counts, items, step, owner)
        return torch.cat(outputs)

    def kept_output(self, output: Any) -> Any:
        """Return a copy of the embeddings in an output of the submodule, or what is there in their place.

        The module may go on to change the output in place, as a ReLU that follows does.
        """
        try:
            value = follow(output, self.path)
        except UsageError as error:
            return error
        # Detached, since a graph that is kept would keep all activations of the step.
        return value.detach().clone() if isinstance(value, Tensor) else value

    def _no_tensor(self, value: Any, owner: str) -> UsageError:
        """Return the error that a submodule returned no tensor, and the entries that are one."""
        if isinstance(value, UsageError):
            return UsageError(f"{owner}(source={self.source!r}): {value}")
        entry = _path_of_tensor(value) or "pooler_output"
        return UsageError(
            f"{owner}: the submodule {self.source!r} returns {describe(value)}, not a tensor. Name the entry that is the "
            f"embedding, such as {self._with_path(entry)}, or return the embeddings from the step."
        )

    def _with_path(self, entry: str) -> str:
        """Return the code of this source with an entry of what the submodule returns."""
        path = f"{self.path}.{entry}" if self.path else entry
        return self.as_argument(source=f"{self.submodule}:{path}")

    def _too_many_calls(
        self, calls: Sequence[CapturedCall], row_counts: Sequence[int], items: int, step: str, owner: str
    ) -> UsageError:
        """Return the error that a step called the submodule several times, and what says which call is meant."""
        fact = (
            f"{owner}: {step} called the submodule {self.submodule!r} {len(calls)} times, with "
            f"{', '.join(map(str, row_counts))} rows, for {counted(items, 'label')}."
        )
        fix = (
            f'Return the embeddings that are meant from the step, as {{"embeddings": embeddings, "labels": labels}}, and '
            f"pass {self.as_argument(source=STEP_KEYS)}."
        )
        if set(row_counts) == {items}:
            # Calls with and without a gradient, or in two modes, are no views: one is that of a teacher or of a penalty.
            if len({call.circumstances for call in calls}) > 1:
                fix = f"The calls differ in their mode or their gradients, so that one of them is the embedding. {fix}"
            else:
                fix += f" If these are {len(calls)} views of each item, pass {self.as_argument(views=len(calls))}."
        return UsageError(f"{fact} {fix}")


def hints_of_source(source: Any, owner: str) -> dict[str, Callable[[Any], str]]:
    """Return each argument of a source that somebody may pass to a monitor -> a function of it that says how it is written.

    Args:
        source: The source that the monitor was given.
        owner: Name of the monitor, for messages.
    """
    given = EmbeddingSource.of(source, owner)
    return {name: partial(given.with_argument, name) for name in SOURCE_ARGUMENTS}


class Code(str):
    """Code that is written as it stands."""

    def __repr__(self) -> str:
        return str(self)


# A function that the user has yet to write.
FUNCTION = Code("function")


def as_code(value: Any) -> str:
    """Write an argument as its caller did; of a function its name."""
    if not callable(value):
        return repr(value)
    name = getattr(value, "__name__", "...")
    return name if name.isidentifier() else "..."


def is_entry(value: Any) -> bool:
    """Return whether a value can name entries of a batch: a word, a position, a function, or several of these."""
    if isinstance(value, list | tuple):
        return bool(value) and all(is_entry(part) for part in value)
    return isinstance(value, str | int | PathLike) or callable(value)


def _path_of_tensor(value: Any) -> str | None:
    """Return the name of an entry that is a tensor (items, dim), else of the first tensor; None if there is none."""
    if isinstance(value, Mapping):
        entries = [(str(name), entry) for name, entry in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        entries = [(str(place), entry) for place, entry in enumerate(value)]
    else:
        entries = [(name, entry) for name, entry in vars(value).items()] if hasattr(value, "__dict__") else []
    tensors = {name: entry for name, entry in entries if isinstance(entry, Tensor)}
    vectors = [name for name, entry in tensors.items() if entry.ndim == 2]
    return next(iter([*vectors, *tensors]), None)


def follow(value: Any, path: str) -> Any:
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
            raise UsageError(f"there is {describe(value)}, which has no entry {name!r}. Name one that it has.")
    return value


def _checked_source(source: Any, owner: str) -> Source:
    """Return a source in one of three forms: a tuple of two keys, a name, or a function.

    Raises:
        ValueError: If it is none of these.
    """
    if isinstance(source, Sequence) and not isinstance(source, str):
        if len(source) != 2 or not all(isinstance(key, str) for key in source):
            raise InputError(f"{owner}(source={source!r}): two keys are needed, such as ('embeddings', 'labels').")
        return (source[0], source[1])  # a configuration file gives a list
    if not isinstance(source, str) and not callable(source):
        raise InputError(
            f"{owner}(source={source!r}) is none of: two keys of the step's output, the name of a submodule, a "
            "function of (outputs, batch), an EmbeddingSource."
        )
    checked: Source = source
    return checked


class EmbeddingReader:
    """Reads (embeddings, labels) of each step.

    With a submodule as source it owns a `Capture` of that submodule's outputs, which keeps them from `start_capture` until
    `read` or `stop_capture`.

    Args:
        source: Says where they are.
        owner: Name of the callback, for messages.
        needs_labels: False: of a step without labels, the labels are an empty `Labels`.
        labels: Reads the labels; by default one for each item.
    """

    def __init__(
        self, source: EmbeddingSource, owner: str, *, needs_labels: bool = True, labels: LabelReader | None = None
    ) -> None:
        self.source = source
        self.labels = labels or LabelReader()
        self.owner = owner
        self.needs_labels = needs_labels
        # keys of the step's output; the second is also that of the labels in a batch
        self.keys = source.source if isinstance(source.source, tuple) else STEP_KEYS
        self._is_compiled = False
        self._may_skip_batches = False
        # steps that have given embeddings in this run: if one gives none later, the next batch may have them again
        self.successful_steps: set[str] = set()
        self.capture = Capture(source.kept_output)

        # end of messages about a training step without embeddings or labels: what the owner can do without them; the owner
        # sets it in its constructor
        self.without_training = ""

    def begin(self) -> None:
        """Begin a run: no step has given embeddings yet."""
        self.detach()
        self.successful_steps.clear()

    def attach(self, module: LightningModule) -> None:
        """Find the submodule that is the source. A compiled module is given its hook now, any other before each step.

        The module may make or replace its layers in `setup` and in `configure_model`, which both come after the `setup` of
        the callbacks.

        Raises:
            UsageError: If there is no submodule of that name, or it runs no hooks.
        """
        self._is_compiled = _is_compiled(module)
        self._may_skip_batches = module.automatic_optimization
        name = self.source.submodule
        if not name:
            return
        call = f"{self.owner}(source={self.source.source!r})"
        check_submodule(module, name, call, " For keys of the step's output pass two: source=('embeddings', 'labels').")
        try:
            self.capture.attach(module, name, is_compiled=self._is_compiled)
        except RuntimeError as error:
            if not isinstance(module.get_submodule(name), torch.jit.ScriptModule):
                raise
            raise UsageError(
                f"{call}: TorchScript has compiled this submodule, and runs no hooks that could read its output. Return "
                f"the embeddings from the steps.{self._embed_fix()}"
            ) from error

    def detach(self) -> None:
        """Remove the hook, and drop what it has captured."""
        self.capture.detach()

    def _embed_fix(self) -> str:
        """Say how a monitor embeds batches itself."""
        if "." in self.source.submodule:
            # It is inside another submodule, and need not take the inputs of a batch.
            fix = self.source.as_argument(source=None, embed=FUNCTION)
            return f" Or pass a function of (module, batch) that returns the embeddings: {fix}."
        fix = self.source.as_argument(source=None, embed=self.source.source)
        return f" Or let {self.owner} embed the batches itself: {fix}."

    def start_capture(self) -> None:
        """Begin a step: keep what the submodule returns from now on."""
        self.capture.start()

    def stop_capture(self) -> None:
        """End the step: drop what was captured, and keep nothing more."""
        self.capture.stop()

    def read(self, outputs: Any, batch: Any, step: str) -> tuple[Tensor, Labels]:
        """Read embeddings (items, dim) and labels (items,) of the step that has just ended, detached, on its device.

        Args:
            outputs: What the step returned.
            batch: What the step was called with.
            step: Name of the step, for messages.

        Raises:
            UsageError: If they are not where the source says; names what was there and the argument that fixes it.
            ValueError: The same, if the next batch may have them: the step has given embeddings before, or skipped a batch.
        """
        try:
            embeddings, labels = self.check(*self._find(outputs, batch, step), step)
        except UsageError as error:
            # A training step may return None to skip its batch, of which Lightning makes an empty mapping.
            is_empty = isinstance(outputs, Mapping) and not outputs
            is_skipped = self._may_skip_batches and step == TRAINING_STEP and is_empty
            if step in self.successful_steps or is_skipped:
                raise InputError(str(error)) from error
            raise
        finally:
            # Also after an error: what the submodule returns from now on belongs to no step.
            self.stop_capture()
        # An evaluation step is successful on all ranks or on none, which its monitor knows at the end of the epoch.
        if step == TRAINING_STEP:
            self.successful_steps.add(step)
        return embeddings, labels

    def _find(self, outputs: Any, batch: Any, step: str) -> tuple[Any, Any]:
        """Return embeddings and labels as they were found, of any type."""
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
        """Return the labels of a batch as they were found, of any type.

        What the user has said comes first; then what the step has returned, whose labels need not be those of the batch
        (views of items, mixed images); and only then the batch.

        Args:
            outputs: What the step returned; None if no step has processed the batch.
            batch: The batch.
            step: Name of the step, for messages.

        Returns:
            The labels; None if there are none and the owner can do without.

        Raises:
            UsageError: If there are none, and the owner needs them.
        """
        key = self.keys[1]
        labels: Any = self.source.labels
        if callable(labels):
            return labels(batch)
        if labels is not None:
            try:
                return batch[labels]
            except (KeyError, IndexError, TypeError) as error:
                fix = self.source.as_argument(labels=_entry_of_labels(batch, self.source.ids))
                raise UsageError(
                    f"{self.owner}, {self.source.but_for()}: the batch is {describe(batch)} and has no entry {labels!r}. "
                    f"Name an entry that it has, {fix}, or pass a function of the batch."
                ) from error
        for part in (outputs, batch):
            if isinstance(part, Mapping) and key in part:
                return part[key]
        if _is_pair(batch) and not _are_views(*batch):
            return batch[1]
        if not self.needs_labels:
            return None
        raise self.no_labels(batch, step)

    def no_labels(self, batch: Any, step: str, owner: str = "") -> UsageError:
        """Return the error that a step has no labels; it says where they were looked for, and how to say where they are.

        Args:
            batch: What the step was called with.
            step: Name of the step.
            owner: Who needs them; by default the owner of the reader.
        """
        description = "two tensors of one shape, such as two views of each item" if _is_pair(batch) else describe(batch)
        fix = self.source.as_argument(labels=_entry_of_labels(batch, self.source.ids))
        return UsageError(
            f"{owner or self.owner} found no labels: {step} returned none under {self.keys[1]!r}, and the batch is "
            f"{description}. Say where they are in the batch: {fix}, or pass a function of the batch as labels."
            + (self.without_training if step == TRAINING_STEP else "")
        )

    def check(self, embeddings: Any, labels: Any, step: str) -> tuple[Tensor, Labels]:
        """Return the embeddings of `step`, checked and detached, and one label for each.

        Raises:
            UsageError: If their types, shapes or numbers are wrong.
            ValueError: If a tensor holds no values, which those of the next batch may.
        """
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
                f"{counted(len(item_labels), 'label')}; expected one for each embedding, in the same order."
            )
        return embeddings.detach(), item_labels


def _no_embeddings(reader: EmbeddingReader, outputs: Any, step: str) -> UsageError:
    """Return the error that says what a step returned in place of embeddings, and which argument fixes it."""
    key, labels_key = reader.keys
    similar_key = _similar_key(key, outputs)
    if similar_key is not None:
        fix = f"Did you mean source=({similar_key!r}, {_similar_key(labels_key, outputs) or labels_key!r})?"
    else:
        fix = (
            f'Return {{"loss": loss, "{key}": embeddings, "{labels_key}": labels}} from it, or say where they are: '
            "source=('other', 'keys'), source=lambda outputs, batch: (embeddings, labels), or "
            "source='name.of.a.submodule' whose output is the embedding."
        )
        if step == TRAINING_STEP:
            fix += reader.without_training
    fact = f"{step} returned {describe(outputs)}; expected {key!r}"
    return UsageError(f"{reader.owner} found no embeddings: {fact}. {fix}")


def _call_source(source: Callable[[Any, Any], Any], outputs: Any, batch: Any, step: str, owner: str) -> tuple[Any, Any]:
    """Return what a function finds for embeddings and labels of a step.

    Raises:
        UsageError: If it raises, or returns no pair.
    """
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


def _check_embeddings(embeddings: Any, step: str, owner: str) -> Tensor:
    """Return embeddings as one floating-point vector for each item, (items, dim).

    Raises:
        UsageError: If they are not.
    """
    if not isinstance(embeddings, Tensor):
        try:
            embeddings = as_tensor(embeddings, "embeddings", owner)
        except ValueError as error:
            fact = f"{owner}: the embeddings of {step} are {describe(embeddings)}, not a tensor."
            raise UsageError(f"{fact} {without_owner(error, owner)}") from error
    if embeddings.ndim > 2 and embeddings.shape[2:].numel() == 1:  # (items, dim, 1, 1) of a global pooling layer
        embeddings = embeddings.flatten(1)
    if embeddings.ndim != 2 or not embeddings.is_floating_point():
        fix = SHAPE_FIXES.get(embeddings.ndim, "Flatten what belongs to one item: embeddings.flatten(1).")
        if embeddings.ndim == 4:
            fix = fix.format(pooled=_mean_over_places(embeddings.shape))
        elif embeddings.ndim == 2:
            fix = as_floats("embeddings", embeddings.dtype)
        raise UsageError(
            f"{owner}: the embeddings of {step} are {describe(embeddings)}; expected one floating-point vector for each "
            f"item, (items, dim). {fix}"
        )
    return cast(Tensor, embeddings)


def _mean_over_places(shape: Sequence[int]) -> str:
    """Write the code of the mean over the places of a feature map of this shape.

    Its channels come first or, as in Swin, last. Since most maps are square, two equal sizes tell which.
    """
    channels_first = "embeddings.mean(dim=(2, 3))"
    channels_last = "embeddings.mean(dim=(1, 2))"
    if shape[2] == shape[3] != shape[1]:
        return channels_first
    if shape[1] == shape[2] != shape[3]:
        return channels_last
    return f"{channels_first} where the channels come first, {channels_last} where they come last"


def read_flag(entry: Entry, outputs: Any, batch: Any, items: int, owner: str, views: int = 1, hint: str = "") -> Tensor:
    """Read the mask of the embeddings of a batch that belong to the gallery, (items,) on the CPU.

    With several views of each item, the mask may hold one entry for each item.
    """
    flags = read_entry("gallery", entry, outputs, batch, owner, hint)
    if isinstance(flags, np.ndarray | list) and all(isinstance(flag, bool | np.bool_) for flag in flags):
        flags = torch.tensor(flags, dtype=torch.bool, device="cpu")
    if not isinstance(flags, Tensor) or flags.ndim != 1:
        raise UsageError(f"{owner}: gallery gave {describe(flags)}; expected one boolean for each item.")
    mask = flags.detach().cpu().bool()
    if len(mask) * views == items:
        mask = mask.repeat(views)
    if len(mask) != items:
        raise UsageError(
            f"{owner}: gallery has {counted(len(mask), 'entry')} for {counted(items, 'embedding')}. Expected one boolean "
            "for each item."
        )
    return mask


def read_names(
    argument: str, entries: Entry | Sequence[Entry], outputs: Any, batch: Any, items: int, owner: str, views: int = 1
) -> Labels:
    """Return an id or a group for each embedding of a batch, on the CPU: equal if all entries are equal.

    Args:
        argument: Name of the monitor's argument, for messages; `ids` name items, and each view of an item gets one of its
            own.
        entries: One entry, or several, which together make the id or group.
        outputs: What the step returned.
        batch: What the step was called with.
        items: Number of embeddings.
        owner: Name of the callback, for messages.
        views: Number of views of each item. There may then be one value for each item instead of each embedding.

    Raises:
        UsageError: If there is no such entry, or it does not hold an integer or a word for each embedding.
    """
    entry_list = [entries] if isinstance(entries, str | int) or callable(entries) else entries
    columns = [read_entry(argument, entry, outputs, batch, owner) for entry in entry_list]
    values = columns[0]
    if len(columns) > 1:
        lists = [_as_list(column) for column in columns]
        lengths = [len(column) for column in lists]
        if len(set(lengths)) > 1:
            raise UsageError(f"{owner}: the entries {entry_list} of {argument} have {lengths} values. One each.")
        values = [repr(row) for row in zip(*lists, strict=True)]
    if views > 1 and hasattr(values, "__len__") and len(values) * views == items:
        names = [str(name) for name in _as_list(values)]
        values = names * views
        if argument == "ids":
            values = [f"{name}, view {view}" for view in range(views) for name in names]
    try:
        return read_ids(values, items, owner, argument)
    except ValueError as error:
        raise UsageError(
            f"{owner}: {argument} gave {describe(values)}; expected an integer or a word for each of the {items} "
            f"embeddings. {without_owner(error, owner)}"
        ) from error


def _as_list(column: Any) -> list[Any]:
    """Return the values of a tensor or an array as Python's numbers, those of another sequence as they are."""
    return column.tolist() if isinstance(column, Tensor | np.ndarray) else list(column)


def read_entry(argument: str, entry: Entry, outputs: Any, batch: Any, owner: str, hint: str = "") -> Any:
    """Return an entry of the step's output or of the batch, or the result of a function of both.

    Raises:
        UsageError: If there is no such entry.
    """
    if callable(entry):
        return entry(outputs, batch)
    if isinstance(entry, int):
        try:
            return batch[entry]
        except (KeyError, IndexError, TypeError) as error:
            raise UsageError(
                f"{owner}({argument}={entry!r}): the batch is {describe(batch)} and has no such entry. Pass a position that "
                f"it has, a key, or a function of (outputs, batch).{hint}"
            ) from error
    for mapping in (outputs, batch):
        if isinstance(mapping, Mapping) and entry in mapping:
            return mapping[entry]
    raise UsageError(
        f"{owner}({argument}={entry!r}): neither what the step returned ({describe(outputs)}) nor the batch "
        f"({describe(batch)}) has that entry. Pass a function of (outputs, batch) that returns it.{hint}"
    )


def _similar_key(key: str, outputs: Any) -> str | None:
    """Return the key of a step's output that `key` is or is probably meant to be; None if there is none."""
    names = [name for name in outputs if isinstance(name, str)] if isinstance(outputs, Mapping) else []
    prefixes = [name for name in names if name.startswith(key) or key.startswith(name)]
    candidates = difflib.get_close_matches(key, names, n=1) or prefixes
    return candidates[0] if candidates else None


def _entry_of_labels(batch: Any, ids: Any = None) -> Any:
    """Return the key or the position of a batch where labels seem to be; where nothing looks like them, a guess.

    Args:
        batch: The batch.
        ids: Where its ids are, which are no labels.
    """
    if isinstance(batch, Mapping):
        entries: dict[Any, Any] = dict(batch)
        fallback: Any = "key"
    elif isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) > 1:
        entries = dict(list(enumerate(batch))[1:])
        fallback = 1
    else:
        entries = {}
        fallback = FUNCTION
    candidates = [name for name, values in entries.items() if name != ids and _are_words_or_integers(values)]
    named = [name for name in candidates if str(name).lower() in LABEL_NAMES]
    # Values that all differ name items.
    repeated = [name for name in candidates if len(set(_as_list(entries[name]))) < len(entries[name])]
    return next(iter([*named, *repeated]), fallback)


def _are_words_or_integers(values: Any) -> bool:
    """Return whether an entry of a batch has an integer or a word for each item."""
    if isinstance(values, Tensor):
        return values.ndim == 1 and not values.is_floating_point()
    return isinstance(values, list | tuple) and all(isinstance(value, str | int) for value in values)


def _is_pair(batch: Any) -> bool:
    """Return whether a batch has two parts, of which the second may be the labels."""
    return isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2


def _are_views(first: Any, second: Any) -> bool:
    """Return whether the two parts of a batch are inputs of one shape. Zeros and ones in the second part are labels."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    if first.shape != second.shape or second.ndim < 2:
        return False
    return second.is_floating_point() and not are_zeros_and_ones(second)


def are_zeros_and_ones(values: Tensor) -> bool:
    """Return whether a tensor holds nothing but 0 and 1."""
    return bool(((values == 0) | (values == 1)).all())


def _is_compiled(module: LightningModule) -> bool:
    """Return whether the module or a submodule was compiled."""
    if getattr(module, "_compiler_ctx", None) is not None:  # where Lightning keeps what it unpacks
        return True
    # `torch.compile(module)` wraps a module and `module.compile()` marks it; PyTorch has no public way to ask for
    # either.
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules())
