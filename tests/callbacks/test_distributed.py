"""Several processes give what one gives, the same to all, also when one of them fails."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fewshot_callbacks import DEFAULT_METRICS, knn_accuracy
from fewshot_callbacks.functional import (
    class_subset,
    discriminant_ratio,
    embedding_health,
    evaluate_retrieval,
    generalization_gap,
)
from tests.callbacks import gloo_jobs
from tests.callbacks.gloo_jobs import ITEMS, QUALITY, seeded, shorter, uneven
from tests.callbacks.models import TRAINING, Embeds, items, measured, scripted, tagged
from tests.functional.variance import logged_by_definition
from tests.gloo_processes import answers, folder_of

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


JOBS = gloo_jobs.__name__


@pytest.fixture(scope="module")
def folder(gloo_folder: Path) -> Path:
    """Where the two write."""
    return folder_of(gloo_folder, JOBS, 2)


@pytest.fixture(scope="module")
def ranks(gloo_folder: Path) -> list[dict[str, Any]]:
    """What each of the two has seen."""
    return answers(gloo_folder, JOBS, 2)


@pytest.fixture(scope="module", params=[2, 3])
def several(request: pytest.FixtureRequest, gloo_folder: Path) -> Any:
    """What each of two, or of three, has seen."""
    return answers(gloo_folder, JOBS, request.param)


def expected_of(*data: Any) -> dict[str, float]:
    """The values of one process, by hand."""
    net = seeded()
    sets = [tensor for part in data for tensor in net.by_hand(part)]
    return measured(*sets)


def ratios_of(data: Any) -> dict[str, float]:
    """J and the variance ratio of one process, by hand."""
    embeddings, labels = seeded().by_hand(data)
    return {"J": float(discriminant_ratio(embeddings, labels))} | logged_by_definition(embeddings, labels)


def values_of(seen: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in seen.items() if key != "said"}


def test_several_processes_give_what_one_gives(several: list[dict[str, Any]]) -> None:
    expected = expected_of(uneven()) | ratios_of(uneven())
    for seen in several:
        assert seen["one"]["said"] == []
        assert values_of(seen["one"]) == pytest.approx({f"val/{k}": v for k, v in expected.items()}, rel=1e-5)


@pytest.mark.parametrize("name", ["health", "health of a list"])
def test_the_health_of_several_is_that_of_one(several: list[dict[str, Any]], name: str) -> None:
    if several[0][name] is None:
        pytest.skip("one process without data is shown by two")
    expected = embedding_health(*uneven().tensors).metrics()
    for seen in several:
        assert values_of(seen[name]) == pytest.approx({f"val/{k}": v for k, v in expected.items()}, rel=1e-6)


def test_a_vote_of_neighbours(several: list[dict[str, Any]]) -> None:
    """Items that samplers repeat vote once, of training and of validation."""
    queries, bank = (seeded().by_hand(data) for data in (uneven(), TRAINING))
    expected = {f"val/train/{key}": value for key, value in knn_accuracy(*queries, *bank, k=(1, 4, 30)).values.items()}
    expected |= {f"val/{key}": value for key, value in knn_accuracy(*queries, k=(1, 4)).values.items()}
    for seen in several:
        assert seen["votes"]["said"] == []
        assert {key: value for key, value in seen["votes"].items() if "knn@" in key} == pytest.approx(
            expected, rel=1e-6
        )


@pytest.mark.parametrize("name", ["targets", "targets, gallery"])
def test_multi_label_targets(several: list[dict[str, Any]], name: str) -> None:
    sets = [tagged(ITEMS)] if name == "targets" else [tagged(5), tagged(ITEMS, seed=1)]
    report = evaluate_retrieval(*(tensor for data in sets for tensor in data.tensors))
    expected = report.metrics() | {"queries_without_match": report.queries_without_match}
    for seen in several:
        assert values_of(seen[name]) == pytest.approx({f"val/{k}": v for k, v in expected.items()}, rel=1e-6)
        failed = values_of(seen["no targets"])  # under the same keys
        assert failed.keys() == values_of(seen["targets"]).keys()
        assert all(math.isnan(value) for value in failed.values())


def test_two_encoders_and_what_is_ignored(several: list[dict[str, Any]]) -> None:
    points, labels = uneven().tensors
    sides = (points, torch.arange(ITEMS)), (points.roll(1, dims=1), torch.arange(ITEMS))
    both = {"a_to_b": measured(*sides[0], *sides[1]), "b_to_a": measured(*sides[1], *sides[0])}
    expected = {f"val/{way}/{name}": value for way, values in both.items() for name, value in values.items()}
    ignored = {
        f"val/{name}": value
        for name, value in measured(points, labels, query_groups=(points[:, 0] > 0.3).long()).items()
    }
    for seen in several:
        assert values_of(seen["two encoders"]) == pytest.approx(expected, rel=1e-6)
        assert values_of(seen["exclude"]) == pytest.approx(ignored, rel=1e-6)


def test_processes_agree_on_labels_that_are_words(several: list[dict[str, Any]]) -> None:
    expected = expected_of(uneven()) | ratios_of(uneven())
    names = sorted({f"class {label:+d}" for label in uneven().tensors[1].tolist()})
    for seen in several:
        assert values_of(seen["words"]["values"]) == pytest.approx(
            {f"val/{k}": v for k, v in expected.items()}, rel=1e-5
        )
        assert list(seen["words"]["names"]) == names


def reported(points: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    """What one process reports, to the last bit."""
    report = evaluate_retrieval(
        points, labels, label_groups=2, metrics=(*DEFAULT_METRICS, "macro_mAP", "recall@precision0.5")
    )
    values = {"values": report.values, "f1": str(report.decision)}
    assert report.grouped is not None
    return values | {"grouped": report.grouped.at[1], "at": str(report.at_precision), "notes": list(report.notes)}


@pytest.mark.parametrize("name", ["exact", "ids", "no data"])
def test_a_report_is_that_of_one_process_to_the_last_bit(several: list[dict[str, Any]], name: str) -> None:
    if several[0][name] is None:
        pytest.skip("one process without data is shown by two")
    expected = reported(*uneven().tensors)
    for seen in several:
        assert seen[name]["report"] == expected
        assert seen[name]["logged"] == several[0][name]["logged"]


def test_a_sampler_of_ones_own_is_said_to_repeat_perhaps(several: list[dict[str, Any]]) -> None:
    count = len(several)
    points, labels = uneven().tensors
    again = torch.arange(5).repeat(count - 1)
    repeated = reported(torch.cat([points, points[again]]), torch.cat([labels, labels[again]]))
    for seen in several:
        assert seen["no ids"]["report"]["values"] == pytest.approx(repeated["values"], rel=1e-12)
    of_map, of_j = several[0]["no ids"]["said"]
    total = 25 + 5 * (count - 1)
    assert f"some of the {total} items of loader 0 came to several processes is unknown, because the sampler" in of_map
    assert "(OwnSampler) is not Lightning's DistributedSampler" in of_map
    assert "Pass ids='key'" in of_map
    assert "(OwnSampler) is not Lightning's DistributedSampler" in of_j
    assert several[0]["ids"]["said"] == [of_j]  # which counts them all the same
    assert several[0]["exact"]["said"] == []


def test_samples_that_give_several_embeddings_are_all_kept(several: list[dict[str, Any]]) -> None:
    """Where an embedding stands in its process does not say of which sample it is: none is taken for a repeated one."""
    points, labels = uneven().tensors
    more = points[: -25 % len(several)], labels[: -25 % len(several)]
    points, labels = torch.cat([points, more[0]]), torch.cat([labels, more[1]])
    views = reported(torch.cat([points, points + 0.1]), labels.repeat(2))
    for seen in several:
        assert seen["two views"]["report"]["values"] == pytest.approx(views["values"], rel=1e-12)
    of_map, of_j = several[0]["two views"]["said"]
    assert "its steps gave" in of_map
    assert "its steps gave" in of_j


def test_samples_that_are_batches_are_all_kept(several: list[dict[str, Any]]) -> None:
    """A sampler of five samples has not dealt five items."""
    points, labels = items().tensors
    count = len(several)
    some = torch.arange(20).view(5, 4)[torch.arange(5 + -5 % count) % 5].flatten()
    expected = reported(points[some], labels[some])
    for seen in several:
        assert seen["in batches"]["report"]["values"] == pytest.approx(expected["values"], rel=1e-12)
    assert "its steps gave" in several[0]["in batches"]["said"][0]


def test_a_sampler_that_deals_to_other_processes_is_said(several: list[dict[str, Any]]) -> None:
    points, labels = (tensor.repeat(len(several), *[1] * (tensor.ndim - 1)) for tensor in uneven().tensors)
    expected = reported(points, labels)
    for seen in several:
        assert seen["all to each"]["report"]["values"] == pytest.approx(expected["values"], rel=1e-12)
    words = f"there are {len(several)} processes, and the sampler is set up for 1"
    assert all(words in said for said in several[0]["all to each"]["said"])
    assert len(several[0]["all to each"]["said"]) == 2


def test_a_repeated_item_would_be_noticed() -> None:
    """The values are those of 25 items, and would be others with the first one twice."""
    data = uneven()
    data.tensors = tuple(torch.cat([tensor, tensor[:1]]) for tensor in data.tensors)
    assert expected_of(data)["mAP"] != pytest.approx(expected_of(uneven())["mAP"], rel=1e-3)
    ratios = [float(discriminant_ratio(*seeded().by_hand(part))) for part in (data, uneven())]
    assert ratios[0] != pytest.approx(ratios[1], rel=1e-3)


def test_several_loaders(several: list[dict[str, Any]]) -> None:
    expected = {}
    for end, data in (("/dataloader_idx_0", uneven()), ("/dataloader_idx_1", shorter())):
        expected |= {f"val/{name}{end}": value for name, value in (expected_of(data) | ratios_of(data)).items()}
    for seen in several:
        assert values_of(seen["two"]) == pytest.approx(expected, rel=1e-5)


def test_a_gallery_loader_and_a_flag(several: list[dict[str, Any]]) -> None:
    searched = expected_of(shorter(), uneven())
    embeddings, labels = seeded().by_hand(uneven())
    chosen = uneven().tensors[0][:, 0] > 0.3
    assert 5 < int(chosen.sum()) < 20
    flagged = measured(embeddings[~chosen], labels[~chosen], embeddings[chosen], labels[chosen])
    for seen in several:
        assert values_of(seen["gallery"]) == pytest.approx({f"val/{k}": v for k, v in searched.items()}, rel=1e-5)
        assert values_of(seen["flag"]) == pytest.approx({f"val/{k}": v for k, v in flagged.items()}, rel=1e-5)


def test_the_generalization_gap(ranks: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    net = Embeds()
    some = class_subset(TRAINING.tensors[1], 5, 7, 0)
    some_val = class_subset(uneven().tensors[1], None, 7, 0)
    reports = []
    for data, chosen in ((TRAINING, some), (uneven(), some_val)):
        embeddings, labels = net.by_hand(data)
        reports.append(
            evaluate_retrieval(
                embeddings[chosen], labels[chosen], metrics=("grouped_recall@1", "recall@1"), label_groups=2
            )
        )
    expected = {f"gap/{name}": value for name, value in generalization_gap(*reports).metrics().items()}
    for seen in ranks:
        assert seen["gap"]["said"] == []
        assert values_of(seen["gap"]) == pytest.approx(expected, rel=1e-5)
        failed = values_of(seen["gap fails"])
        assert math.isnan(failed["gap/grouped_recall@1"])
    assert "ArithmeticError: this process has failed" in ranks[0]["gap fails"]["said"][0]


@pytest.mark.parametrize(
    ("how", "map_words", "j_words"),
    [
        (
            "nan",
            "12 of 25 rows of embeddings hold NaN or Inf, the first at index 1",
            "embeddings of a batch are not finite",
        ),
        ("nothing", "found no embeddings: validation_step returned None", "found no embeddings: validation_step retu"),
    ],
)
def test_a_failure_of_one_process_is_nan_in_both_and_said_by_the_first(
    ranks: list[dict[str, Any]], how: str, map_words: str, j_words: str
) -> None:
    for seen in ranks:
        assert {"val/mAP", "val/recall@1", "val/J"} <= set(seen[how])
        assert all(math.isnan(value) for value in values_of(seen[how]).values())
    of_map, of_j = ranks[0][how]["said"]
    assert of_map.startswith("val/mAP and the other values of this set are NaN.")
    assert map_words in of_map
    assert of_j.startswith("val/J and the other values of this set are NaN.")
    assert j_words in of_j
    assert ranks[1][how]["said"] == []


def test_a_strict_error_of_one_process_stops_all(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert "12 of 25 rows of embeddings hold NaN or Inf, the first at index 1" in seen["strict"]
        assert "found no embeddings: validation_step returned None" in seen["sanity check"]


def test_the_state_of_python_random_is_left_alone(ranks: list[dict[str, Any]]) -> None:
    assert [seen["random is touched by"] for seen in ranks] == [[], []]


def test_a_fit(ranks: list[dict[str, Any]]) -> None:
    points, labels = uneven().tensors
    maps = [measured(scripted(points, labels, quality), labels)["mAP"] for quality in QUALITY]
    for seen in ranks:
        assert seen["fit"]["mAP"] == pytest.approx(maps, rel=1e-6)
        assert seen["fit"]["best"] == "epoch=1.ckpt"
        own = [float(discriminant_ratio(torch.tensor(z), torch.tensor(y))) for z, y in seen["fit"]["steps"]]
        assert seen["fit"]["J"] == pytest.approx(own, rel=1e-5, nan_ok=True)
    assert ranks[0]["fit"]["J"] != ranks[1]["fit"]["J"]


def test_dynamics_of_each_process_are_those_of_its_own_episodes_without_a_trace(ranks: list[dict[str, Any]]) -> None:
    histories = []
    for seen in ranks:
        assert seen["dynamics"]["weights"] == seen["no dynamics"]["weights"] == ranks[0]["dynamics"]["weights"]
        (history,) = seen["dynamics"]["histories"]
        assert history["steps"] == [2, 4, 6]
        assert all(math.isfinite(value) for value in history["norm_ratio"])
        histories.append(history)
    assert histories[0]["norm_ratio"] != histories[1]["norm_ratio"]


def test_the_first_process_writes_the_dynamics(ranks: list[dict[str, Any]], folder: Path) -> None:
    assert json.loads((folder / "training_dynamics.json").read_text()) == ranks[0]["dynamics"]["histories"][0]
