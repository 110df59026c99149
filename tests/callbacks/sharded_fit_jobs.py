"""Jobs of real processes (see `tests.gloo_processes`): fits of sharded modules with every monitor, and their checkpoints."""

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from tests.callbacks.models import loader, retrieval
from tests.callbacks.sharded_jobs import (
    TRAINING,
    VALIDATION,
    Large,
    divided,
    dynamics,
    fit,
    logged,
    monitors,
    of_own_modules,
    run_of,
    validate,
    weights_of,
)


def fits(name: str) -> dict[str, Any]:
    monitor = dynamics()
    seen = {"plain": fit(name), "watched": fit(name, *monitors(), monitor)}
    return seen | {"dynamics": monitor.history.to_dict()}


def resumed(name: str, folder: Path, *, whole_file: bool) -> dict[str, Any]:
    """What two epochs give, without a break and resumed from a checkpoint of the first."""
    seen = {}
    path = folder / f"{name}, {whole_file}"
    for how, epochs, start in (("whole", 2, None), ("first", 1, None), ("resumed", 2, path / "last.ckpt")):
        saver = ModelCheckpoint(dirpath=path, save_last=True, save_top_k=0)
        saved = [saver] if how == "first" else []
        monitor, gain = dynamics(), retrieval(source="encoder", compare="first")
        run = run_of(name, gain, monitor, *saved, whole_file=whole_file, max_epochs=epochs)
        net = divided(Large(), name)
        run.fit(net, loader(TRAINING, batch_size=12), loader(VALIDATION, batch_size=6), ckpt_path=start)
        seen[how] = {"weights": weights_of(net), "logged": logged(run), "steps": len(monitor.history)}
    return seen | {"is folder": (path / "last.ckpt").is_dir()}


def answers(rank: int, folder: Path) -> dict[str, Any]:
    """What this process has seen."""
    return {
        "validate": {"tensor parallel": validate("tensor parallel")},
        "fits": {name: fits(name) for name in ("ddp", "sharded", "tensor parallel")},
        "own": {name: of_own_modules(name) for name in ("ddp", "sharded")},
        "resumed": [resumed("sharded", folder, whole_file=whole) for whole in (False, True)],
    }
