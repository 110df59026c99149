"""The recipes in one process, and in each of two: what they print, or what their validation gives."""

from __future__ import annotations

import io
import os
import runpy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning import fabric
from lightning import pytorch as lightning
from torch.utils.data import DataLoader, Subset

from fewshot_callbacks import discriminant_ratio, evaluate_retrieval
from tests import cases

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"

WITH_A_TRAINER = (
    *("arcface", "classifier", "hugging_face", "linear_probe", "lora", "manual_optimisation", "matryoshka"),
    *("multi_label", "overfitting", "person_reid", "query_gallery", "several_loaders", "simclr", "text_embeddings"),
    *("triplet", "two_encoders", "verification"),
)
"""Recipes whose Trainer validates: they say nothing of processes, and Lightning deals their sets to any number of them."""


class MeasuredError(Exception):
    """Ends a recipe after its first validation."""


def run(recipe: str, **replaced: Any) -> dict[str, Any]:
    """The names of a recipe after it has run."""
    with redirect_stdout(io.StringIO()) as screen:
        names = runpy.run_path(str(RECIPES / f"{recipe}.py"), init_globals=replaced, run_name="__main__")
    return names | {"printed": screen.getvalue()}


# ------------------------------------------------------------------------------------------------------------ Lightning


def uneven(loader: Any) -> Any:
    """The same loader of an odd number of items, which two processes cannot share evenly."""
    if not isinstance(loader, DataLoader):
        loader.flattened = [uneven(each) for each in loader.flattened]
        return loader
    data = loader.dataset
    some = Subset(data, range(len(data) - 1 + len(data) % 2))  # type: ignore[arg-type]
    return DataLoader(some, batch_size=loader.batch_size, collate_fn=loader.collate_fn)


class OfAllProcesses(lightning.Trainer):
    """Validates the module as it was made, in as many processes as there are, and ends."""

    def __init__(self, **settings: Any) -> None:
        count = torch.distributed.get_world_size()
        parallel = {"devices": count, "strategy": "ddp" if count > 1 else "auto", "accelerator": "cpu"}
        super().__init__(**settings | parallel | {"logger": False, "enable_progress_bar": False})

    def fit(self, model: Any, train: Any = None, val: Any = None, **others: Any) -> None:
        self.validate(model, val)

    def validate(self, model: Any, loaders: Any, **others: Any) -> Any:
        sets = [uneven(each) for each in loaders] if isinstance(loaders, list) else uneven(loaders)
        super().validate(model, sets, verbose=False)
        raise MeasuredError({key: float(value) for key, value in self.callback_metrics.items()})


def of_trainer(recipe: str) -> dict[str, float]:
    """What the validation of a recipe logs; and why its values are NaN or uncertain, if they are."""
    with warnings.catch_warnings(record=True) as caught, patch.object(lightning, "Trainer", OfAllProcesses):
        warnings.simplefilter("always")
        try:
            run(recipe)
        except MeasuredError as measured:
            said = [str(warning.message) for warning in caught]
            assert not any("is unknown, because" in words for words in said), said
            return {key: value for key, value in measured.args[0].items() if "share_of_time" not in key}
    raise AssertionError(f"{recipe} has validated nothing")


# ------------------------------------------------------------------------------------------------------------- the others


def of_ddp() -> dict[str, Any]:
    return {"printed": run("ddp")["printed"]}


def of_fabric() -> dict[str, float]:
    """How far the metrics are from what the functions give of the whole set; and how many items the sampler repeats."""
    count = torch.distributed.get_world_size()
    parallel = {"devices": count, "strategy": "ddp" if count > 1 else "auto"}
    made = fabric.Fabric
    with patch.object(fabric, "Fabric", lambda **settings: made(**settings | parallel)):
        names = run("fabric")
    with torch.no_grad():
        pair = names["encoder"](names["points"]), names["labels"]
    report = evaluate_retrieval(*pair)
    return {
        "mAP": float(names["values"]["mAP"]) - report.mAP,
        "recall@1": float(names["values"]["recall@1"]) - report["recall@1"],
        "J": float(names["ratio"].compute()) / float(discriminant_ratio(*pair)) - 1,
        "repeated": -len(names["data"]) % count,
    }


@contextmanager
def known_to_accelerate() -> Iterator[None]:
    """As torchrun sets the variables; and the processes go on after the recipe."""
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    variables = {"WORLD_SIZE": str(count), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with patch.dict(os.environ, variables), patch.object(torch.distributed, "destroy_process_group"):
        yield


def of_accelerate() -> dict[str, str]:
    with known_to_accelerate():
        return {"printed": run("hugging_face_accelerate")["printed"]}


def of_hugging_face_trainer(folder: Path) -> dict[str, float]:
    """How far what the Trainer gives of 81 images is from what the function gives of them."""
    text = (RECIPES / "hugging_face_trainer.py").read_text(encoding="utf-8")
    assert text.count("80") == 2
    names: dict[str, Any] = {"__name__": "__main__"}
    os.chdir(folder)
    with known_to_accelerate(), redirect_stdout(io.StringIO()):
        exec(compile(text.replace("80", "81"), "hugging_face_trainer.py", "exec"), names)
        with torch.no_grad():
            found = names["trainer"].model.eval()(names["images"], names["labels"])
    report = evaluate_retrieval(found["embeddings"], names["labels"])
    return {key: names["values"][f"eval_{key}"] - report[key] for key in ("mAP", "recall@1")}


def answer(job: Callable[[], Any]) -> Any:
    """What a job gives; or which library it lacks."""
    try:
        return job()
    except ModuleNotFoundError as missing:
        return missing


def answers(rank: int, folder: Path) -> dict[str, Any]:
    """What each recipe gives in this process."""
    os.environ["FEWSHOT_CALLBACKS_CACHE"] = str(folder / "cache")
    os.chdir(folder)
    drawn = cases.first_classes(20)
    found: dict[str, Any] = {}
    with patch("fewshot_callbacks.data.glyphs.load_drawing", lambda *_: drawn):
        for recipe in WITH_A_TRAINER:
            found[recipe] = answer(partial(of_trainer, recipe))
    found["fabric"] = answer(of_fabric)
    if torch.distributed.get_world_size() == 2:
        found["ddp"] = of_ddp()
    found["hugging_face_accelerate"] = answer(of_accelerate)
    found["hugging_face_trainer"] = answer(partial(of_hugging_face_trainer, folder))
    return found
