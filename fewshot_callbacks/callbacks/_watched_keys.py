"""The keys that checkpoints, early stopping and schedulers wait for: misspelt ones, and those with the wrong `mode`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from types import CodeType
from typing import Any, Literal, NamedTuple

from lightning.pytorch import Trainer

from fewshot_callbacks.callbacks._conduct import FailurePolicy, UsageError

# Which values of a key are better; None where neither are.
Better = Literal["higher", "lower"] | None

# First words of the keys of a validation, as modules name it.
STAGES = ("val", "valid", "validation", "eval", "dev", "test")

# Similarity of two names from which one may be a misspelling of the other: `grouped_recall` of `grouped_recall@1`, but
# none of `loss`, `acc` and `auc`.
NEAR = 0.7

# The value of `mode` for which values are better.
_MODES = {"higher": "max", "lower": "min"}


class Watcher(NamedTuple):
    """A callback or scheduler that waits for a key."""

    key: str
    name: str
    # which value it takes for the best, "min" or "max"; None where it does not matter
    mode: str | None


def watchers(trainer: Trainer) -> list[Watcher]:
    """List the callbacks and schedulers of a Trainer that monitor a key."""
    found = []
    for each in trainer.callbacks:  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
        if isinstance(getattr(each, "monitor", None), str):
            keeps_none = getattr(each, "save_top_k", None) == 0
            mode = None if keeps_none else getattr(each, "mode", None)
            found.append(Watcher(each.monitor, type(each).__name__, mode))
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and isinstance(config.monitor, str):
            mode = getattr(config.scheduler, "mode", None)
            found.append(Watcher(config.monitor, type(config.scheduler).__name__, mode))
    return found


def look_for_wrong_modes(
    trainer: Trainer, known: Mapping[str, Better], logged: Collection[str] | None, policy: FailurePolicy
) -> None:
    """Warn of who takes the worst value of a key for the best.

    Args:
        trainer: The Trainer.
        known: The keys of its monitors, and which values are better.
        logged: The keys that others log; None if that is not known.
        policy: Warns.
    """
    for watcher in watchers(trainer):
        better = known.get(watcher.key)
        if better is None or watcher.key in (logged or ()) or watcher.mode not in _MODES.values():
            continue
        right = _MODES[better]
        if watcher.mode != right:
            taken = "smallest" if watcher.mode == "min" else "largest"
            policy.warn(
                f"{watcher.name}(monitor={watcher.key!r}, mode={watcher.mode!r}) takes the {taken} {watcher.key} for the "
                f"best, but {better} values are better. Pass mode={right!r}."
            )


def look_for_misspelt_keys(
    trainer: Trainer, known: Collection[str], logged: Collection[str] | None, policy: FailurePolicy
) -> None:
    """Look for keys that somebody waits for, that nobody logs, and that are near a known one.

    Args:
        trainer: The Trainer.
        known: The keys of its monitors.
        logged: The keys that the sanity check has shown; None if there was none.
        policy: Handles a key misspelt, and warns where the module may still log such a key.
    """
    for key, who in {watcher.key: watcher.name for watcher in watchers(trainer)}.items():
        if key in known or key in (logged or ()):
            continue
        meant = same_but_for_spelling(key, sorted(known))
        other = meant or near(key, sorted(known))
        if other is None:
            continue
        fact = f"{who}(monitor={key!r}): no monitor here logs this value, and nothing else has so far"
        error = f"{fact}. Did you mean {other!r}?"
        if meant is not None and logged is not None and not is_written_by_user(trainer, key):
            policy.handle(UsageError(error), "Lightning will find no value to monitor.")
        else:
            policy.warn(error)


def same_but_for_spelling(key: str, known: Collection[str]) -> str | None:
    """Return the known key that differs in capitals, punctuation and the name of the stage alone, or in that of a loader.

    Examples:
        >>> known = ["val/mAP/photos", "val/mAP/sketches", "val/recall@1"]
        >>> [same_but_for_spelling(key, known) for key in ("val_recall_1", "mAP", "valid/recall@1/photos", "val/recall")]
        ['val/recall@1', 'val/mAP/photos', 'val/recall@1', None]
        >>> same_but_for_spelling("train/mAP", known)
    """
    letters, beginnings = _letters(key), set(_beginnings(key))
    same = [other for other in known if _letters(other) == letters]
    same += [other for other in known if letters in _beginnings(other) or _letters(other) in beginnings]
    return same[0] if same else None


def near(key: str, known: Collection[str]) -> str | None:
    """Return the known key of the same stage that is most similar, if one is; for `f1` it is `pair_f1`.

    Examples:
        >>> known = ["val/mAP", "val/recall@1", "val/recall@10", "val/pair_f1", "gap/recall@1"]
        >>> [near(key, known) for key in ("val/maps", "valid_recall@100", "val/f1", "val/loss", "map")]
        ['val/mAP', 'val/recall@10', 'val/pair_f1', None, None]
    """
    stage, name = _parted(key)
    names = {_parted(each)[1]: each for each in known if _parted(each)[0] == stage}
    of_pairs = [each for other, each in names.items() if f"{other}/".startswith(f"pair_{name}/")]
    if of_pairs:
        return of_pairs[0]
    found = get_close_matches(name, names, n=1, cutoff=NEAR)
    return names[found[0]] if found else None


def is_written_by_user(trainer: Trainer, key: str) -> bool:
    """Check whether the code of the module, or of a callback from elsewhere, holds the key as a string.

    It may then log the key in training, which the sanity check does not show.
    """
    others = trainer.callbacks  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
    kinds = {kind for owner in (trainer.lightning_module, *others) for kind in type(owner).__mro__}
    foreign = ("builtins", "fewshot_callbacks", "lightning", "pytorch_lightning", "torch")
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in foreign]
    methods = [getattr(value, "__wrapped__", value) for kind in own for value in vars(kind).values()]
    return any(key in _constants(method.__code__) for method in methods if hasattr(method, "__code__"))


def _constants(code: CodeType) -> Iterator[Any]:
    """List the constants of some code, also of functions inside it."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        elif isinstance(constant, tuple | frozenset):
            yield from constant
        else:
            yield constant


def _letters(key: str) -> str:
    """Return the letters and digits of a key, without the stage.

    Examples:
        >>> [_letters(key) for key in ("val/recall@1", "valid_recall_1", "Recall@1", "train/recall@1")]
        ['recall1', 'recall1', 'recall1', 'trainrecall1']
    """
    words = re.findall(r"[^\W_]+", key.casefold())
    return "".join(words[1:] if words and words[0] in STAGES else words)


def _beginnings(key: str) -> list[str]:
    """List the letters of all that a key begins with up to a slash."""
    ends = [found.start() for found in re.finditer("/", key)]
    return list(filter(None, (_letters(key[:end]) for end in ends)))


def _parted(key: str) -> tuple[str, str]:
    """Part a key into its stage, which has one name for all of a validation, and the rest."""
    stage, name = re.fullmatch(r"([^\W_]*)\W?_?(.*)", key.casefold(), re.DOTALL).groups()  # type: ignore[union-attr]
    return ("val" if stage in STAGES else stage), name
