"""`EmbeddingSource`: where the embedding, the label and the id of each item come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from os import PathLike, fspath
from typing import Any

import torch
from torch import Tensor

from fewshot_callbacks.callbacks._capture import CapturedCall
from fewshot_callbacks.callbacks._conduct import UsageError, check_at_least, describe
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.settings import plain_list
from fewshot_callbacks.system.words import counted
from fewshot_callbacks.trainer.lightning import LightningModule

# `("embeddings", "labels")`: keys of the mapping that the step returns. `"encoder.head"`: the output of that submodule.
# `"encoder:pooler_output"`: an entry of that output. A function of (outputs, batch): returns (embeddings, labels).
Source = str | tuple[str, str] | Callable[[Any, Any], tuple[Any, Any]]

LabelSource = str | int | Callable[[Any], Any]
"""Where the labels, integers or strings, are in a batch: a key, a position, or a function of the batch."""

# With two encoders it can be two entries, one for each side.
LabelSources = str | int | tuple[str, str] | Callable[[Any], Any]

# How a batch is embedded outside a step: the name of a submodule that is called with the batch's inputs, with an optional
# path in its output (`"encoder:pooler_output"`); or a function of (module, batch) that returns embeddings, or
# (embeddings, labels).
Embed = str | Callable[[LightningModule, Any], Tensor | tuple[Tensor, Any]]

# Key of an entry of the step's output or of the batch, its position in the batch, or a function of (outputs, batch).
Entry = str | int | Callable[[Any, Any], Any]

STEP_KEYS = ("embeddings", "labels")

# Argument of an `EmbeddingSource` that a user may pass to a monitor by mistake -> an example value, and what it is.
SOURCE_ARGUMENTS = {
    "labels": ("label", "an entry of the batch"),
    "embed": ("encoder", "a submodule or a function of (module, batch)"),
    "ids": ("path", "an entry of the batch or of the step's output that names each item"),
    "views": (2, "the number of views of each item"),
    "spill_to": ("folder", "a folder on a disk"),
}


@dataclass(frozen=True)
class EmbeddingSource:
    """Tells a monitor where the embedding, the label and the id of each item come from.

    Monitors of one Trainer with equal sources share one copy of the embeddings. Two functions are equal only if they
    are the same object: create one source with a function, and pass it to all monitors.

    Examples:
        >>> EmbeddingSource("encoder")  # the output of self.encoder
        EmbeddingSource(source='encoder', labels=None, embed=None, ids=None, views=1, spill_to=None)
        >>> source = EmbeddingSource("encoder", labels="species", ids="path")  # the batch has these two entries
        >>> first_view = EmbeddingSource(embed=lambda module, batch: module.backbone(batch[0][0]).flatten(1))

        Pass one source to all monitors:

        >>> import torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.encoder = torch.nn.Identity()
        ...     def validation_step(self, batch, batch_idx):
        ...         self.encoder(batch[0])
        >>> from fewshot_callbacks import DiscriminantRatioMonitor, KnnMonitor
        >>> items = torch.tensor([[-2.0], [2.0], [4.0], [8.0], [10.0], [14.0]])
        >>> loader = DataLoader(TensorDataset(items, torch.tensor([0, 0, 1, 1, 2, 2])), batch_size=3)
        >>> source = EmbeddingSource("encoder", labels=1)  # the second part of the batch
        >>> monitors = [DiscriminantRatioMonitor(source=source), KnnMonitor(1, bank="self", source=source)]
        >>> options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        >>> trainer = Trainer(callbacks=monitors, accelerator="cpu", **options)
        >>> _ = trainer.validate(Model(), loader, verbose=False)
        >>> round(trainer.callback_metrics["val/J"].item(), 4)
        6.0

    Args:
        source: The embedding of a step, in one of three forms. Two keys of the mapping that the step returns: the
            default is `("embeddings", "labels")`. The name of a submodule whose output is the embedding, with a path
            after a colon if the output is an object or a mapping (`"encoder:pooler_output"`,
            `"encoder:hidden_states.0"`). A function of (outputs, batch) that returns (embeddings, labels).
        labels: Where the labels are in the batch, if the step does not return them: a key, a position, or a function of
            the batch. By default the labels that the step returned, or else the second part of the batch or its entry
            `labels`. With two encoders you can pass two keys of the step's output or of the batch, one for each side.
        embed: How a batch is embedded outside a step: the name of a submodule that is called with the batch's inputs,
            or a function of (module, batch) that returns embeddings or (embeddings, labels). Some monitors compare with
            training items, which are embedded in this way. The default is the submodule that `source` names, or else
            the module itself. With `embed` and without `source`, all batches are embedded so, and the steps need not
            give embeddings. The module is in evaluation mode meanwhile, and random states are restored.
        ids: An integer or a string that identifies each item, such as its path: an entry of the step's output or of the
            batch, a position in the batch, or a function of (outputs, batch). Each id counts once, and no query finds
            an item with its own id in a gallery or bank. Items with one id but different embeddings or labels give a
            warning. You need ids if your own sampler, or the workers of an iterable data set, repeat samples. The
            padding of Lightning's `DistributedSampler` is removed without ids. With two encoders you can pass two
            entries, one for each side: `("image_id", "caption_id")`.
        views: Number of embeddings that a step makes of each item, at least 1; 2 for SimCLR. All items come in the
            first view, then all in the next, in one call of the submodule or in several. The labels are repeated
            accordingly. Steps that make one embedding per item, such as a validation step, are read as usual.
        spill_to: A folder on a disk, for validation sets larger than memory. Embeddings are written to a file in it and
            read when they are needed. The file has no name, and is deleted after the evaluation.

    Raises:
        ValueError: If the source has another form, or `views` is less than 1.
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
        """Return the `EmbeddingSource` for an argument of any accepted form.

        Raises:
            ValueError: If the form is unknown. The message names the monitor, `owner`.
        """
        if isinstance(source, Mapping):  # from a configuration file
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
        """Whether every batch is embedded outside the steps, because they give no embeddings."""
        return self.source is None

    @property
    def submodule(self) -> str:
        """Name of the submodule whose output is the embedding; empty for other sources."""
        return self.source.partition(":")[0] if isinstance(self.source, str) else ""

    @property
    def path(self) -> str:
        """Path of the embedding in the output of the submodule; empty if the output is the embedding."""
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
        """Return this source with changes as an argument of a monitor: `source=('embeddings', 'labels')`."""
        call = self.but_for(**changes)
        source = changes.get("source", self.source) or STEP_KEYS
        alone = (f"EmbeddingSource({as_code(source)})", "EmbeddingSource()")
        return f"source={as_code(source)}" if call in alone else f"source={call}"

    def with_argument(self, name: str, value: Any) -> str:
        """Return this source with an argument that the user gave a monitor instead, as code, and what the argument is.

        Args:
            name: One of `SOURCE_ARGUMENTS`.
            value: The user's value.
        """
        example, description = SOURCE_ARGUMENTS[name]
        return f"{self.as_argument(**{name: value if is_entry(value) else example})}, {description}"

    def call_on(self, inputs: str) -> str:
        """Return the code that embeds `inputs`: `module.encoder(batch['image'])`."""
        name = self.submodule
        if not all(part.isidentifier() for part in name.split(".")) and name:
            called = f"module.get_submodule({name!r})"
        else:
            called = f"module.{name}" if name else "module"
        steps = self.path.split(".") if self.path else []
        return f"{called}({inputs})" + "".join(f"[{step}]" if step.isdecimal() else f".{step}" for step in steps)

    def join_calls(self, calls: Sequence[CapturedCall], items: int | None, step: str, owner: str, hint: str) -> Tensor:
        """Return what the submodule returned in a step as one tensor of embeddings.

        Args:
            calls: The captured calls, see `kept_output`.
            items: Number of labels; None without labels, and then the number of rows is not checked.
            step: Name of the step, for messages.
            owner: Name of the callback, for messages.
            hint: Another possible cause if the submodule was not called, for messages.

        Raises:
            UsageError: If there was no call, an output is not a tensor, or the number of rows of several calls fits
                neither the labels nor the views.
        """
        if not calls:
            raise UsageError(
                f"{owner}: {step} did not call the submodule {self.submodule!r}, so there are no embeddings. Name a "
                f"submodule that this step calls as a function: {self.submodule}(x). A call of {self.submodule}.forward(x) "
                f"runs no hooks.{hint}"
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
        """Return a copy of the embeddings in an output of the submodule; if there are none, what is there instead.

        A copy is needed because the module may change the output in place, as a following ReLU does.
        """
        try:
            value = follow(output, self.path)
        except UsageError as error:
            return error
        # Detached: the graph would keep all activations of the step in memory.
        return value.detach().clone() if isinstance(value, Tensor) else value

    def _no_tensor(self, value: Any, owner: str) -> UsageError:
        """Return the error that a submodule did not return a tensor, with an entry that is a tensor."""
        if isinstance(value, UsageError):
            return UsageError(f"{owner}(source={self.source!r}): {value}")
        entry = _path_of_tensor(value) or "pooler_output"
        return UsageError(
            f"{owner}: the submodule {self.source!r} returns {describe(value)}, not a tensor. Name the entry that is the "
            f"embedding, such as {self._with_path(entry)}, or return the embeddings from the step."
        )

    def _with_path(self, entry: str) -> str:
        """Return the code of this source with an entry of the submodule's output."""
        path = f"{self.path}.{entry}" if self.path else entry
        return self.as_argument(source=f"{self.submodule}:{path}")

    def _too_many_calls(
        self, calls: Sequence[CapturedCall], row_counts: Sequence[int], items: int, step: str, owner: str
    ) -> UsageError:
        """Return the error that a step called the submodule several times, with ways to choose a call."""
        fact = (
            f"{owner}: {step} called the submodule {self.submodule!r} {len(calls)} times, with "
            f"{', '.join(map(str, row_counts))} rows, for {counted(items, 'label')}."
        )
        fix = (
            f'Return the embeddings that you mean from the step, as {{"embeddings": embeddings, "labels": labels}}, and '
            f"pass {self.as_argument(source=STEP_KEYS)}."
        )
        if set(row_counts) == {items}:
            # Calls with and without a gradient, or in two modes, are not views: one belongs to a teacher or a penalty.
            if len({call.circumstances for call in calls}) > 1:
                fix = f"The calls differ in their mode or their gradients, so only one of them is the embedding. {fix}"
            else:
                fix += f" If these are {len(calls)} views of each item, pass {self.as_argument(views=len(calls))}."
        return UsageError(f"{fact} {fix}")


def hints_of_source(source: Any, owner: str) -> dict[str, Callable[[Any], str]]:
    """Return argument of a source -> a function of its value that returns the right call."""
    given = EmbeddingSource.of(source, owner)
    return {name: partial(given.with_argument, name) for name in SOURCE_ARGUMENTS}


class Code(str):
    """Code whose `repr` is the code itself."""

    def __repr__(self) -> str:
        return str(self)


# A function that the user has yet to write.
FUNCTION = Code("function")


def as_code(value: Any) -> str:
    """Return an argument as code; a function is its name."""
    if not callable(value):
        return repr(value)
    name = getattr(value, "__name__", "...")
    return name if name.isidentifier() else "..."


def is_entry(value: Any) -> bool:
    """Return whether a value can name entries of a batch: a string, a position, a function, or several of these."""
    if isinstance(value, list | tuple):
        return bool(value) and all(is_entry(part) for part in value)
    return isinstance(value, str | int | PathLike) or callable(value)


def _path_of_tensor(value: Any) -> str | None:
    """Return the name of the first entry of shape (items, dim), or else of the first tensor; None without tensors."""
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
    """Return the entry at a dotted path of keys, positions and attributes; for an empty path the value itself.

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
            raise UsageError(f"{describe(value)} has no entry {name!r}. Name an entry that it has.")
    return value


def _checked_source(source: Any, owner: str) -> Source:
    """Return a source as a tuple of two keys, a name, or a function; refuse other forms."""
    if isinstance(source, Sequence) and not isinstance(source, str):
        if len(source) != 2 or not all(isinstance(key, str) for key in source):
            raise InputError(f"{owner}(source={source!r}): two keys are needed, such as ('embeddings', 'labels').")
        return (source[0], source[1])  # a configuration file gives a list
    if not isinstance(source, str) and not callable(source):
        raise InputError(
            f"{owner}(source={source!r}) is not a source. Pass two keys of the step's output, the name of a submodule, a "
            "function of (outputs, batch), or an EmbeddingSource."
        )
    checked: Source = source
    return checked
