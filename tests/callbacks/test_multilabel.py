"""Multi-label targets on a real Trainer: logged is what `evaluate_retrieval` says of the embeddings of all items."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.callbacks import DiscriminantRatioMonitor, RetrievalMonitor
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.functional import evaluate_retrieval
from tests.callbacks.models import FEATURES, LABELS, Net, loader, said, tagged, trainer, validated

pytestmark = pytest.mark.filterwarnings("ignore:.*have no match")


class Tagger(Net):
    """A validation step as of a multi-label classifier; `form` is what it makes of the targets."""

    def __init__(self, form: Callable[[Tensor], Any] = lambda targets: targets) -> None:
        super().__init__()
        self.form = form

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        points, targets = batch
        return {"embeddings": self.embed(points), "labels": self.form(targets), "gallery": points[:, 0] > 0.3}


def expected(net: Net, *data: TensorDataset, prefix: str = "val", **settings: Any) -> dict[str, float]:
    report = evaluate_retrieval(*(tensor for part in data for tensor in net.by_hand(part)), **settings)
    values = report.metrics() | {"queries_without_match": report.queries_without_match}
    return {f"{prefix}/{name}": pytest.approx(value, rel=1e-5) for name, value in values.items()}


@pytest.mark.parametrize(
    "form", [lambda targets: targets, Tensor.float, Tensor.bool], ids=["integers", "float", "bool"]
)
def test_multi_label_targets_of_any_number_type(form: Callable[[Tensor], Any]) -> None:
    net, monitor = Tagger(form), RetrievalMonitor()
    logged = validated(monitor, net, loader(tagged()))
    assert logged == expected(net, tagged())
    assert {"val/mAP", "val/map@r", "val/r_precision", "val/recall@1", "val/ndcg@10"} < set(logged)
    assert "val/f1" not in logged


def test_two_loaders_and_a_gallery() -> None:
    net, other = Tagger(), tagged(25, seed=1)
    logged = validated(RetrievalMonitor(), net, [loader(tagged()), loader(other)])
    for number, data in enumerate((tagged(), other)):
        end = f"/dataloader_idx_{number}"
        assert {key.removesuffix(end): value for key, value in logged.items() if key.endswith(end)} == expected(
            net, data
        )
    assert validated(RetrievalMonitor(gallery=1), net, [loader(tagged()), loader(other)]) == expected(
        net, tagged(), other
    )


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"metrics": (*DEFAULT_METRICS, "macro_mAP")}, "grouped_recall@1, macro_mAP"),
        ({"label_groups": [[0, 1], [2, 3]]}, "label_groups"),
        ({"metrics": "prototype_accuracy"}, "prototype_accuracy"),
    ],
)
def test_settings_for_one_label_each_end_the_fit_at_the_sanity_check(settings: dict[str, Any], names: str) -> None:
    run = trainer(RetrievalMonitor(**settings), num_sanity_val_steps=1, max_epochs=1)
    with pytest.raises(
        UsageError, match=rf"RetrievalMonitor: {names} cannot be computed where items have several labels"
    ):
        run.fit(Tagger(), loader(), loader(tagged()))


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (lambda targets: targets * 0.5, r"labels have shape \(11, 5\), and \d+ entries are neither 0 nor 1"),
        (
            lambda targets: targets if len(targets) == 11 else targets[:, :3],
            "are zeros and ones of 3 labels, those before were zeros and ones of 5 labels",
        ),
        (
            lambda targets: targets if len(targets) == 11 else targets[:, 0],
            "are integers, those before were zeros and ones of 5 labels",
        ),
    ],
)
def test_targets_that_cannot_be_read_end_the_run_with_what_they_should_be(form: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        trainer(RetrievalMonitor()).validate(Tagger(form), loader(tagged()), verbose=False)


def test_what_cannot_be_measured_is_nan_under_the_same_keys() -> None:
    net = Tagger()
    known = set(validated(RetrievalMonitor(), net, loader(tagged())))
    net.encoder[0].weight.data.fill_(torch.nan)
    run = trainer(RetrievalMonitor())
    with pytest.warns(UserWarning, match="40 of 40 rows of embeddings hold NaN"):
        run.validate(net, loader(tagged()), verbose=False)
    assert set(run.callback_metrics) == known
    assert all(value.isnan() for value in run.callback_metrics.values())


def test_each_epoch_of_a_fit_is_measured_and_nobody_shares_a_label_is_nan() -> None:
    monitor = RetrievalMonitor()
    run = trainer(monitor, max_epochs=2)
    lone = TensorDataset(torch.randn(3, FEATURES), torch.eye(3, LABELS))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(Tagger(), loader(), [loader(tagged()), loader(lone)])
    assert sum("none of the 3 queries has a relevant candidate" in word for word in said(caught)) == 1
    assert set(monitor.reports) == {"/dataloader_idx_0"}
    assert run.callback_metrics["val/mAP/dataloader_idx_1"].isnan()


def test_other_monitors_refuse_them() -> None:
    with pytest.raises(UsageError, match=r"DiscriminantRatioMonitor.*labels.*\(11, 5\)"):
        trainer(DiscriminantRatioMonitor()).validate(Tagger(), loader(tagged()), verbose=False)
