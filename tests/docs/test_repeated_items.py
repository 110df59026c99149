"""The table of what counts items: each row counts an item once by its id, or takes no ids; and no name is missing."""

import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

import fewshot_callbacks
from fewshot_callbacks import (
    DiscriminantRatio,
    DiscriminantRatioMonitor,
    EmbeddingHealthMonitor,
    EmbeddingSource,
    GeneralizationGapMonitor,
    KnnMonitor,
    ProbeMonitor,
    RetrievalEvaluation,
    RetrievalMonitor,
    TrialList,
    VarianceRatio,
    VerificationMonitor,
    functional,
)
from fewshot_callbacks.cli.main import main
from fewshot_callbacks.metrics import EmbeddingStore
from tests.callbacks.models import Embeds, Labelled, items, trainer
from tests.callbacks.silhouette import SilhouetteMonitor
from tests.docs.tables import ROOT

PAGE = (ROOT / "docs" / "evaluate" / "repeated_items.md").read_text(encoding="utf-8")
TABLE = re.search(r"^\| what counts items \|.*\n\|.*\n((?:\|.*\n)+)", PAGE, flags=re.M)
assert TABLE is not None
ROWS = {
    name: how.strip()
    for first, how in re.findall(r"^\| (.*?) \| (.*) \|$", TABLE[1], flags=re.M)
    if not first.startswith("the bank")
    for name in re.findall(r"`(\w+)`", first)
}
"""Each name of the table, and how it is given ids."""

POINTS, LABELS = items(per_class=8).tensors
TWICE = torch.cat([torch.arange(len(POINTS)), torch.arange(0, len(POINTS), 3)])
TWICE = TWICE[torch.randperm(len(TWICE), generator=torch.Generator().manual_seed(3))]
"""The index of each item in an order of its own, every third one twice."""
ONCE = torch.arange(len(POINTS))
GALLERY, GALLERY_LABELS = items(per_class=6, seed=9).tensors


# ----------------------------------------------------------------------------------------------------- names in the table


def counts_items(thing: Any) -> bool:
    """Whether something public is given items, or batches of them."""
    bases = (Callback, LightningModule, Metric, nn.Module, EmbeddingStore)
    if inspect.isclass(thing):
        return issubclass(thing, bases) and not _is_part_of_others(thing)
    if not inspect.isfunction(thing):
        return False
    return bool({"embeddings", "queries", "before", "same"} & inspect.signature(thing).parameters.keys())


def _is_part_of_others(thing: type) -> bool:
    """Whether it is a network, a head, or what a function returns."""
    parts = ("BinaryCodes", "Conv4", "DistanceRatioHead", "SoftmaxHead")
    return hasattr(thing, "__dataclass_fields__") or thing.__name__ in parts


def test_every_name_that_counts_items_is_in_the_table() -> None:
    public = {name: getattr(fewshot_callbacks, name) for name in fewshot_callbacks.__all__}
    public |= {name: getattr(functional, name) for name in functional.__all__}
    for layer in ("metrics", "integrations"):
        module = import_module(f"fewshot_callbacks.{layer}")
        for name in module.__all__:
            with suppress(ModuleNotFoundError):  # an integration without its library
                public[name] = getattr(module, name)
    counting = {name for name, thing in public.items() if counts_items(thing)}
    counting |= {"BatchRetrievalMetrics", "ExactAccuracyCalculator", "ExactRetrievalEvaluator"}
    not_counting = {"sample_episodes"}  # its queries are a number
    assert counting - not_counting - ROWS.keys() == set()
    evaluators = set(import_module("fewshot_callbacks.integrations").__all__)
    assert ROWS.keys() - public.keys() - evaluators == set()


# -------------------------------------------------------------------------------------------------------------- functions

WITH_IDS = [name for name, how in ROWS.items() if how.startswith("`query_ids`")]
WITH_IDS_OF_ONE_SET = [name for name, how in ROWS.items() if how.startswith("`ids`")]
WITHOUT_IDS = [name for name, how in ROWS.items() if how.startswith("it takes none")]
SETTINGS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "evaluate_retrieval": {"label_groups": None},
        "grouped_recall": {"label_groups": 3},
        "compression_costs": {"dims": 3, "label_groups": None},
        "near_duplicates": {"min_score": 0.5},
        "nearest": {"k": 3},
        "knn_accuracy": {"k": (1, 5)},
        "suspects": {"k": 5},
    }
)


def values_of(name: str, result: Any) -> Any:
    """What a result says of the whole set, whatever the order of its items."""
    if name in ("discriminant_ratio", "variance_ratio"):
        return float(result)
    if hasattr(result, "metrics"):
        return result.metrics()
    values: dict[str, Callable[[], Any]] = {
        "grouped_recall": lambda: result.at,
        "variance_ratio_of_set": lambda: (result.value, *result.interval),
        "suspects": lambda: result.noise_rate,
        "near_duplicates": lambda: result.total,
        "nearest": lambda: result.scores.sort(dim=0).values.flatten().tolist(),
    }
    return values.get(name, lambda: result.values)()


def gallery_of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    known = GALLERY_LABELS < 40 if name == "evaluate_identification" else slice(None)  # others are in no gallery
    return GALLERY[known], GALLERY_LABELS[known]


def called(name: str, rows: torch.Tensor, gallery: bool = False, **ids: Any) -> Any:
    function = getattr(functional, name)
    parameters = inspect.signature(function).parameters
    sides = (POINTS[rows], LABELS[rows]) if "labels" in " ".join(parameters) else (POINTS[rows],)
    if gallery:
        sides = (*sides, *gallery_of(name)[: len(sides)])
    if name == "search_quality":
        first = 1000 if "gallery_ids" in ids else 0
        lists = first + rows[:, None] * torch.tensor([1, 3, 7]) % len(gallery_of(name)[0])
        sides = (lists, *sides[::2])
    return function(*sides, **SETTINGS.get(name, {}), **ids)


NEEDS_GALLERY = ("linear_probe", "evaluate_identification")  # in one set all of these queries are mated
CALLS_WITH_IDS = [
    (name, gallery) for name in WITH_IDS for gallery in (False, True) if gallery or name not in NEEDS_GALLERY
]
CALLS_WITH_IDS += [(name, False) for name in WITH_IDS_OF_ONE_SET]


@pytest.mark.filterwarnings("ignore:.*find a copy")
@pytest.mark.parametrize(("name", "gallery"), CALLS_WITH_IDS)
def test_a_function_with_ids_counts_each_item_once(name: str, gallery: bool) -> None:
    ids = {"ids" if name in WITH_IDS_OF_ONE_SET else "query_ids": TWICE}
    ids |= {"gallery_ids": torch.arange(len(gallery_of(name)[0])) + 1000} if gallery else {}
    found, expected, twice = (
        called(name, rows, gallery, **more) for rows, more in ((TWICE, ids), (ONCE, {}), (TWICE, {}))
    )
    assert values_of(name, found) == pytest.approx(values_of(name, expected), rel=1e-9)
    assert values_of(name, found) != pytest.approx(values_of(name, twice), rel=1e-9)


@pytest.mark.parametrize("name", WITHOUT_IDS)
def test_a_function_without_ids_is_given_the_first_item_of_each(name: str) -> None:
    """As the page says it; and repeated items would count twice."""
    assert not any("ids" in parameter for parameter in inspect.signature(getattr(functional, name)).parameters)
    gallery = name in NEEDS_GALLERY
    first = np.sort(np.unique(TWICE, return_index=True)[1])
    found, expected, twice = (called(name, rows, gallery) for rows in (TWICE[first], ONCE, TWICE))
    assert values_of(name, found) == pytest.approx(values_of(name, expected), rel=1e-6)
    assert values_of(name, found) != pytest.approx(values_of(name, twice), rel=1e-6)


# ---------------------------------------------------------------------------------------------------------------- classes


@pytest.mark.parametrize(
    "make", [DiscriminantRatio, VarianceRatio, lambda: RetrievalEvaluation(label_groups=None)], ids=lambda make: ""
)
def test_a_metric_counts_each_item_once(make: Callable[[], Any]) -> None:
    found, expected = make(), make()
    for rows in TWICE.split(7):
        found.update(POINTS[rows], LABELS[rows], ids=rows)
    expected.update(POINTS, LABELS)
    torch.testing.assert_close(found.compute(), expected.compute(), rtol=1e-6, atol=1e-9)


def test_a_store_counts_each_item_once() -> None:
    store = EmbeddingStore()
    for rows in TWICE.split(7):
        store.append(POINTS[rows], LABELS[rows], ids=rows)
    shard = store.shard()
    order = shard.ids.codes.argsort()
    assert shard.embeddings[order].equal(POINTS)


BANK = Labelled(items(per_class=6, seed=5))
SOURCE = EmbeddingSource(("embeddings", "labels"), embed=lambda module, batch: batch[0], ids="index")
TRIALS = TrialList(same=(True, False, True), items=(("0", "0", "3"), ("1", "2", "13")))
MONITORS: dict[str, Callable[[], Any]] = {
    "RetrievalMonitor": lambda: RetrievalMonitor(source=SOURCE, label_groups=None),
    "DiscriminantRatioMonitor": lambda: DiscriminantRatioMonitor(source=SOURCE),
    "EmbeddingHealthMonitor": lambda: EmbeddingHealthMonitor(source=SOURCE, k=5),
    "KnnMonitor": lambda: KnnMonitor((1, 5), BANK, source=SOURCE),
    "ProbeMonitor": lambda: ProbeMonitor(BANK, source=SOURCE),
    "GeneralizationGapMonitor": lambda: GeneralizationGapMonitor(
        bank=BANK, source=SOURCE, classes=None, label_groups=3, max_share=None
    ),
    "Monitor": lambda: SilhouetteMonitor(source=SOURCE),
    "VerificationMonitor": lambda: VerificationMonitor(
        TRIALS, ids=lambda outputs, batch: list(map(str, batch[2].tolist())), source=SOURCE
    ),
}
OF_THE_SET = {"KnnMonitor": lambda: KnnMonitor((1, 5), "self", source=SOURCE)}


class Step(Embeds):
    """The points are the embeddings."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"embeddings": batch[0], "labels": batch[1], "index": batch[2]}

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.validation_step(batch, batch_idx)


def logged(monitor: Any, rows: torch.Tensor, stage: str, gallery: bool = False) -> dict[str, float]:
    sets = [DataLoader(TensorDataset(POINTS[rows], LABELS[rows], rows), batch_size=7)]
    if gallery:
        index = torch.arange(len(GALLERY)) + 1000
        sets.append(DataLoader(TensorDataset(GALLERY, GALLERY_LABELS, index), batch_size=7))
    run = trainer(monitor)
    getattr(run, stage)(Step(), sets, verbose=False)
    return {key: float(value) for key, value in run.callback_metrics.items() if "share_of_time" not in key}


def test_every_monitor_of_the_table_is_tried() -> None:
    of_source = {name for name, how in ROWS.items() if how.startswith("the `ids` of")}
    assert of_source == MONITORS.keys()


@pytest.mark.filterwarnings("ignore:.*non-target trials")
@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("name", MONITORS)
def test_a_monitor_counts_each_item_once(name: str, stage: str) -> None:
    if (name, stage) == ("GeneralizationGapMonitor", "test"):
        return  # it compares with nothing in a test
    for makes in (MONITORS, OF_THE_SET):
        if name in makes:
            found = logged(makes[name](), TWICE, stage)
            assert len(found) > 0
            assert found == pytest.approx(logged(makes[name](), ONCE, stage), rel=1e-5, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("name", ["RetrievalMonitor", "Monitor"])
def test_a_gallery_is_left_as_it_is(name: str) -> None:
    settings: dict[str, Any] = {"source": SOURCE, "gallery": 1}
    makes = {
        "RetrievalMonitor": lambda: RetrievalMonitor(label_groups=None, **settings),
        "Monitor": lambda: SilhouetteMonitor(**settings),
    }
    found = logged(makes[name](), TWICE, "validate", gallery=True)
    assert found == pytest.approx(logged(makes[name](), ONCE, "validate", gallery=True), rel=1e-5, abs=1e-6)


# --------------------------------------------------------------------------------------------------------------- commands


def test_commands_count_each_item_once(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`evaluate` with all that it prints of J, and the rows of a report."""
    once, twice = tmp_path / "once.npz", tmp_path / "twice.npz"
    np.savez(once, embeddings=POINTS.numpy(), labels=LABELS.numpy(), ids=ONCE.numpy())
    np.savez(twice, embeddings=POINTS[TWICE].numpy(), labels=LABELS[TWICE].numpy(), ids=TWICE.numpy())
    printed = []
    for file in (once, twice):
        main(["evaluate", str(file), "--label_groups", "null"])
        printed.append(capsys.readouterr().out)
    values = [re.findall(r"-?\d+\.\d+", re.sub(r"\d+\.\d+ s\b", "", text)) for text in printed]
    assert len(values[0]) > 5
    assert values[0] == values[1]
