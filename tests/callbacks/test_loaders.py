"""`loaders`: some of the loaders are measured, and the others need no embeddings."""

import math
import warnings
from functools import partial
from typing import Any

import pytest

from fewshot_callbacks import TrialList
from fewshot_callbacks.callbacks import (
    DiscriminantRatioMonitor,
    EmbeddingHealthMonitor,
    KnnMonitor,
    ProbeMonitor,
    VerificationMonitor,
)
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.functional import embedding_health
from tests.callbacks.models import (
    VALIDATION,
    Embeds,
    Labelled,
    Net,
    Returns,
    close,
    expected_metrics,
    expected_ratios,
    gap_monitor,
    items,
    loader,
    log_of_validation,
    messages_of,
    retrieval,
    trainer,
    with_prefix,
)
from tests.callbacks.panel_rows import indexed_panels
from tests.callbacks.silhouette import SilhouetteMonitor
from tests.messages import refused


@pytest.fixture(autouse=True)
def _pictures_elsewhere(tmp_path: Any, monkeypatch: Any) -> None:
    """Without a logger, pictures lie in the working folder."""
    monkeypatch.chdir(tmp_path)


OTHER, GALLERY = items(seed=9), items(per_class=4, seed=4)


class Both(Net):
    """The steps of the first loader classify; those of the others give embeddings."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(batch, batch_idx) if dataloader_idx else batch[0].mean()


def loaders() -> dict[str, Any]:
    return {"classify": loader(), "retrieve": loader(VALIDATION), "other": loader(OTHER), "shop": loader(GALLERY)}


def logged(*monitors: Any, stage: str = "validate") -> tuple[Net, dict[str, float]]:
    net, run = Both(), trainer(*monitors, num_sanity_val_steps=1)
    getattr(run, stage)(net, *[loader()] * (stage == "fit"), loaders())
    values = {key: float(value) for key, value in run.callback_metrics.items() if "train" not in key}
    return net, {key: value for key, value in values.items() if "share_of_time" not in key}


@pytest.mark.parametrize("stage", ["validate", "fit"])
@pytest.mark.parametrize("chosen", ["retrieve", ("retrieve",), 1, [1]])
def test_one_loader_is_measured_and_the_others_need_no_embeddings(chosen: Any, stage: str) -> None:
    every = (
        DiscriminantRatioMonitor(loaders=chosen),
        EmbeddingHealthMonitor(loaders=chosen),
        indexed_panels(1, 1, 1),
    )
    net, values = logged(retrieval(loaders=chosen), *every, stage=stage)
    pair = net.by_hand(VALIDATION)
    assert values == close(
        with_prefix(expected_metrics(*pair) | expected_ratios(*pair) | embedding_health(*pair, k=None).metrics()),
        rel=1e-4,
    )


def test_some_loaders_keep_the_ends_of_their_keys() -> None:
    net, values = logged(retrieval(loaders=("other", 1)), DiscriminantRatioMonitor(loaders=("other", 1)))
    expected = {}
    for data, end in ((VALIDATION, "/retrieve"), (OTHER, "/other")):
        expected |= with_prefix(expected_metrics(*net.by_hand(data)) | expected_ratios(*net.by_hand(data)), end=end)
    assert values == close(expected)


@pytest.mark.parametrize("chosen", ["retrieve", ("retrieve", "shop")])
def test_a_loader_that_searches_a_gallery(chosen: Any) -> None:
    net, values = logged(retrieval(loaders=chosen, gallery="shop"))
    assert values == close(with_prefix(expected_metrics(*net.by_hand(VALIDATION), *net.by_hand(GALLERY))))


def test_loaders_that_search_a_gallery() -> None:
    net, values = logged(retrieval(loaders=("retrieve", "other"), gallery="shop"))
    gallery = net.by_hand(GALLERY)
    expected = with_prefix(expected_metrics(*net.by_hand(VALIDATION), *gallery), end="/retrieve")
    assert values == close(expected | with_prefix(expected_metrics(*net.by_hand(OTHER), *gallery), end="/other"))


def trials(loaders: Any, **settings: Any) -> VerificationMonitor:
    made = TrialList(same=(True, False), items=(("0", "1"), ("0", "2")))
    return VerificationMonitor(made, ids=lambda outputs, batch: batch[1], loaders=loaders, **settings)


KINDS = {
    "retrieval": retrieval,
    "J": DiscriminantRatioMonitor,
    "health": EmbeddingHealthMonitor,
    "votes": partial(KnnMonitor, 1, "self"),
    "probe": partial(ProbeMonitor, Labelled(VALIDATION)),
    "trials": trials,
    "own": SilhouetteMonitor,
    "gap": lambda loaders, **settings: gap_monitor(val_loader=loaders, **settings),
}
STAGES = [("validate", 0), ("test", 0), ("fit", 0), ("fit", 1)]


def is_possible(kind: str, chosen: Any, stage: str) -> bool:
    """The gap takes one loader, and compares with nothing in a test."""
    return kind != "gap" or not (isinstance(chosen, tuple) or stage == "test")


@pytest.mark.parametrize(
    ("kind", "chosen", "stage", "sanity_steps"),
    [
        (kind, chosen, *stage)
        for kind in KINDS
        for chosen in (3, -1, "nope", ("here", 7))
        for stage in STAGES
        if is_possible(kind, chosen, stage[0])
    ],
)
def test_a_loader_that_is_not_there_is_refused_before_the_first_batch(
    kind: str, chosen: Any, stage: str, sanity_steps: int
) -> None:
    """The first batch of a validation is none that is read."""
    seen: list[Any] = []
    net = Returns(lambda *batch: seen.append(batch))
    run = trainer(KINDS[kind](loaders=chosen), limit_train_batches=1, num_sanity_val_steps=sanity_steps)
    sets = {"here": loader(), "there": loader()}
    argument = "val_loader" if kind == "gap" else "loaders"
    wrong = chosen[-1] if isinstance(chosen, tuple) else chosen
    with refused(UsageError, f"{argument}={chosen!r}", repr(wrong), "'here'", "'there'", 2):
        getattr(run, stage)(net, *[loader()] * (stage == "fit"), sets)
    assert seen == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_that_is_not_there_is_one_warning_and_nan_where_nothing_is_strict(kind: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = log_of_validation(KINDS[kind](loaders=3, strict=False), Embeds())
    [said] = messages_of(caught, 3, "'dataloader_idx_0'")
    assert "NaN" in said
    assert values
    assert all(math.isnan(value) for key, value in values.items() if "share_of_time" not in key)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gap"])
@pytest.mark.parametrize("none", [(), []])
def test_no_loader_at_all_is_refused_at_once(kind: str, none: Any) -> None:
    with refused(ValueError, f"loaders={none!r}"):
        KINDS[kind](loaders=none)


@pytest.mark.parametrize("stage", ["validate", "test", "fit"])
def test_a_gallery_without_queries_ends_the_run(stage: str) -> None:
    with refused(UsageError, "gallery='shop'", "loaders='shop'", "queries"):
        logged(retrieval(loaders="shop", gallery="shop"), stage=stage)
