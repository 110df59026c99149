"""Logged values, their names, and the folder of the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fewshot_callbacks.distributed.torch_distributed import process_count
from fewshot_callbacks.trainer.lightning import LightningModule, Trainer


def log_synced_values(
    module: LightningModule, values: Mapping[str, float], progress_bar_key: str | None = None
) -> None:
    """Log values of an epoch; with several ranks, the largest. The progress bar shows the value of one key."""
    options: dict[str, Any] = {"on_step": False, "on_epoch": True, "add_dataloader_idx": False, "batch_size": 1}
    if process_count() > 1:  # without a reduction, Lightning warns
        options |= {"sync_dist": True, "reduce_fx": "max"}
    for key, value in values.items():
        module.log(key, value, prog_bar=key == progress_bar_key, **options)


def logged_names(trainer: Trainer) -> set[str]:
    """Return the keys that were logged in this epoch."""
    results = trainer._results
    if results is None:
        return set()
    logged = [result for result in results.values() if not result.has_reset and result.meta.on_epoch]
    return {results._forked_name(result, on_step=False)[0] for result in logged}


def run_folder(trainer: Trainer, logger: Any = None) -> str:
    """Return the folder of the run.

    `Trainer.log_dir` is not used because it is collective.

    Args:
        trainer: The Trainer of the run.
        logger: The logger whose folder is returned; None for the first one.
    """
    if logger is None:
        logger = next(iter(trainer.loggers), None)
    if logger is None:
        return trainer.default_root_dir
    if logger.log_dir is not None:
        return str(logger.log_dir)
    # Runs of this logger share a folder.
    return os.path.join(logger.save_dir or trainer.default_root_dir, str(logger.name), str(logger.version))
