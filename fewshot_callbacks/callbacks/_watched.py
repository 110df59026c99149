"""What checkpoints, early stopping and schedulers of a Trainer wait for, held against what its monitors log."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from lightning.pytorch import Trainer

from fewshot_callbacks.callbacks._failures import FailurePolicy, UsageError

# Similarity of two names from which one may be a misspelling of the other: `grouped_recall` of `grouped_recall@1`, but
# none of `loss`, `acc` and `auc`.
NEAR = 0.7


def watched(trainer: Trainer) -> dict[str, str]:
    """Find the keys that callbacks and schedulers of a Trainer monitor: key -> who does."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
    found = {each.monitor: type(each).__name__ for each in callbacks if isinstance(getattr(each, "monitor", None), str)}
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and isinstance(config.monitor, str):
            found.setdefault(config.monitor, type(config.scheduler).__name__)
    return found


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
    for key, who in watched(trainer).items():
        if key in known or key in (logged or ()):
            continue
        meant = same_but_for_spelling(key, sorted(known))
        other = meant or near(key, sorted(known))
        if other is None:
            continue
        fact = f"{who}(monitor={key!r}): no monitor here logs this value, and nothing else has so far"
        error = f"{fact}. Did you mean {other!r}?"
        if meant is not None and logged is not None:
            policy.handle(UsageError(error), "Lightning will find no value to monitor.")
        else:
            policy.warn(error)


def same_but_for_spelling(key: str, known: Collection[str]) -> str | None:
    """Return the known key that differs in capitals and punctuation alone, or in the end that names a loader.

    Examples:
        >>> known = ["val/mAP/photos", "val/mAP/sketches", "val/recall@1"]
        >>> [same_but_for_spelling(key, known) for key in ("val/recall_1", "val/mAP", "val/recall@1/photos", "val/recall")]
        ['val/recall@1', 'val/mAP/photos', 'val/recall@1', None]
    """
    for other in known:
        if _letters(key) == _letters(other) or other.startswith(f"{key}/") or key.startswith(f"{other}/"):
            return other
    return None


def near(key: str, known: Collection[str]) -> str | None:
    """Return the known key of the same stage that is most similar, if one is.

    Examples:
        >>> known = ["val/mAP", "val/recall@1", "val/recall@10", "test/mAP"]
        >>> [near(key, known) for key in ("val/maps", "val/recall@100", "val/loss", "map")]
        ['val/mAP', 'val/recall@10', None, None]
    """
    stage, _, name = key.partition("/")
    names = {each.partition("/")[2].casefold(): each for each in known if each.startswith(f"{stage}/")}
    found = get_close_matches(name.casefold(), names, n=1, cutoff=NEAR)
    return names[found[0]] if found else None


def _letters(key: str) -> str:
    return "".join(character for character in key.casefold() if character.isalnum() or character == "/")
