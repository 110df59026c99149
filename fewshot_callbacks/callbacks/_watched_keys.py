"""Checks the keys that checkpoints, early stopping and schedulers monitor: misspelt keys, and a wrong `mode`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Literal, NamedTuple

from fewshot_callbacks.callbacks._conduct import FailurePolicy, UsageError
from fewshot_callbacks.trainer.lightning import Trainer

# which values of a key are better; None if neither
Better = Literal["higher", "lower"] | None

# first parts of keys that mean an evaluation
STAGES = ("val", "valid", "validation", "eval", "dev", "test")

# From this similarity on, a name may be a misspelling of another: `grouped_recall` is near `grouped_recall@1`, but `loss`,
# `acc` and `auc` are not near each other.
NEAR = 0.7

# which values are better -> `mode`
_MODES = {"higher": "max", "lower": "min"}


class Watcher(NamedTuple):
    """A callback or scheduler that monitors a key."""

    key: str
    # name of its class
    name: str
    # "min" or "max"; None if it does not matter
    mode: str | None


def watchers(trainer: Trainer) -> list[Watcher]:
    """Return the callbacks and schedulers of a Trainer that monitor a key."""
    result = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
        if isinstance(getattr(callback, "monitor", None), str):
            saves_nothing = getattr(callback, "save_top_k", None) == 0
            mode = None if saves_nothing else getattr(callback, "mode", None)
            result.append(Watcher(callback.monitor, type(callback).__name__, mode))
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and isinstance(config.monitor, str):
            mode = getattr(config.scheduler, "mode", None)
            result.append(Watcher(config.monitor, type(config.scheduler).__name__, mode))
    return result


def look_for_wrong_modes(
    trainer: Trainer, known: Mapping[str, Better], logged: Collection[str] | None, policy: FailurePolicy
) -> None:
    """Warn if the `mode` of a callback or scheduler takes the worst value for the best.

    `logged` are the keys that others log; None if unknown.
    """
    for watcher in watchers(trainer):
        better = known.get(watcher.key)
        if better is None or watcher.key in (logged or ()) or watcher.mode not in _MODES.values():
            continue
        right_mode = _MODES[better]
        if watcher.mode != right_mode:
            extreme = "smallest" if watcher.mode == "min" else "largest"
            policy.warn(
                f"{watcher.name}(monitor={watcher.key!r}, mode={watcher.mode!r}) takes the {extreme} {watcher.key} for the "
                f"best, but {better} values are better. Pass mode={right_mode!r}."
            )


def look_for_misspelt_keys(
    trainer: Trainer, known: Collection[str], logged: Collection[str] | None, policy: FailurePolicy
) -> None:
    """Warn of monitored keys that nobody has logged yet, and that resemble the key of a monitor.

    This is an error if the policy is strict and the sanity check has run.
    """
    for key, name in {watcher.key: watcher.name for watcher in watchers(trainer)}.items():
        if key in known or key in (logged or ()):
            continue
        same_key = same_but_for_spelling(key, sorted(known))
        similar_key = same_key or near(key, sorted(known))
        if similar_key is None:
            continue
        fact = f"{name}(monitor={key!r}): no monitor of this Trainer logs this value, and nothing else has logged it so far"
        message = f"{fact}. Did you mean {similar_key!r}?"
        if policy.strict and same_key is not None and logged is not None:
            raise UsageError(message)
        policy.warn(message)


def same_but_for_spelling(key: str, known: Collection[str]) -> str | None:
    """Return the known key with the same letters and digits, apart from the stage or a loader's name; None without one.

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
    """Return the most similar known key of the same stage; None without one. For `f1` it is `pair_f1`.

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


def _letters(key: str) -> str:
    """Return the letters and digits of a key, without the stage.

    Examples:
        >>> [_letters(key) for key in ("val/recall@1", "valid_recall_1", "Recall@1", "train/recall@1")]
        ['recall1', 'recall1', 'recall1', 'trainrecall1']
    """
    words = re.findall(r"[^\W_]+", key.casefold())
    return "".join(words[1:] if words and words[0] in STAGES else words)


def _beginnings(key: str) -> list[str]:
    """Return the letters of each beginning of a key up to a slash: `recall1` for `val/recall@1/photos`."""
    slashes = [match.start() for match in re.finditer("/", key)]
    letters = [_letters(key[:slash]) for slash in slashes]
    return [word for word in letters if word]


def _parted(key: str) -> tuple[str, str]:
    """Return the stage of a key, which is `val` for all of `STAGES`, and the rest of the key."""
    stage, name = re.fullmatch(r"([^\W_]*)\W?_?(.*)", key.casefold(), re.DOTALL).groups()  # type: ignore[union-attr]
    return ("val" if stage in STAGES else stage), name
