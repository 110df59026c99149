"""Several processes give what one gives, the same to all, also when one of them fails."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fewshot_callbacks.functional import evaluate_retrieval
from tests.callbacks import process_jobs
from tests.callbacks.models import close
from tests.callbacks.process_jobs import EXACT, SCRIPT, uneven
from tests.gloo_processes import answers, folder_of
from tests.messages import missing_facts

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

JOBS = process_jobs.__name__
Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def alone(gloo_folder: Path) -> dict[str, Any]:
    """What one process has seen; that it is right is shown beside what has no Trainer in the other files."""
    (seen,) = answers(gloo_folder, JOBS, 1)
    return seen


@pytest.fixture(scope="module")
def ranks(gloo_folder: Path) -> Seen:
    """What each of two has seen."""
    return answers(gloo_folder, JOBS, 2)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def several(request: pytest.FixtureRequest, gloo_folder: Path) -> Any:
    """What each of two, or of three, has seen."""
    return answers(gloo_folder, JOBS, request.param)


def values(seen: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in seen.items() if key != "said"}


SETS = (
    *("loaders", "gallery", "words and flag", "targets", "two encoders", "groups", "compression", "votes"),
    *("captions", "generalization gap"),
)


@pytest.mark.parametrize("name", [*SETS, "health", "health of a list"])
def test_several_processes_give_what_one_gives(alone: dict[str, Any], ranks: Seen, name: str) -> None:
    expected = values(alone[name])
    assert len(expected) > 4
    for seen in (alone, *ranks):
        assert seen[name]["said"] == [] or name == "health of a list"  # which may repeat what it likes
        # rounding of what is embedded in batches of other sizes
        assert values(seen[name]) == close(expected, rel=1e-5 if name == "loaders" else 1e-6)


@pytest.mark.parametrize("name", ["exact", "ids", "no data"])
def test_a_report_is_that_of_one_process_to_the_last_bit(alone: dict[str, Any], several: Seen, name: str) -> None:
    """Parts of uneven size, or a process that has none."""
    for seen in several:
        for part in ("values", "written"):
            assert seen[name][part] == alone["exact"][part]
        assert seen[name]["logged"] == several[0][name]["logged"]
        assert seen[name]["logged"] == close(alone["exact"]["logged"], rel=1e-9)
        assert name == "no data" or seen[name]["said"] == []  # of a list nothing is known


def values_of(*sets: torch.Tensor) -> Any:
    return pytest.approx(evaluate_retrieval(*sets, **EXACT).values, rel=1e-12)


def test_a_sampler_of_ones_own_is_said_to_repeat_perhaps(ranks: Seen) -> None:
    repeated = values_of(*(torch.cat([tensor, tensor[:5]]) for tensor in uneven().tensors))
    assert [seen["no ids"]["values"] for seen in ranks] == [repeated, repeated]
    [said] = ranks[0]["no ids"]["said"]  # once for both monitors
    facts = 30, "loader", 0, "processes", "OwnSampler", "DistributedSampler", "ids='key'"
    assert missing_facts(said, facts) == []


def test_captions_of_an_image_that_a_sampler_repeats_are_said_to_count_twice(
    alone: dict[str, Any], ranks: Seen
) -> None:
    """How many rows of the second encoder are those of a sample is not known."""
    assert alone["captions without ids"]["said"] == []
    assert values(alone["captions without ids"]) == values(alone["captions"])
    [said] = ranks[0]["captions without ids"]["said"]
    cure = "labels=('image', 'image_of_text'), ids=('key', 'key_of_second')"
    assert missing_facts(said, (78, "loader", 0, "processes", cure)) == []


def test_a_sampler_that_deals_to_other_processes_is_said(ranks: Seen) -> None:
    doubled = values_of(*(torch.cat([tensor, tensor]) for tensor in uneven().tensors))
    assert [seen["all to each"]["values"] for seen in ranks] == [doubled, doubled]
    [said] = ranks[0]["all to each"]["said"]
    assert missing_facts(said, ("loader", 0, 2, "processes", "sampler", 1)) == []


def test_samples_that_give_several_embeddings_are_all_kept(several: Seen) -> None:
    """Where an embedding stands in its process does not say of which sample it is: none is taken for a repeated one."""
    points, labels = (torch.cat([tensor, tensor[: -25 % len(several)]]) for tensor in uneven().tensors)
    views = values_of(torch.cat([points, points + 0.1]), labels.repeat(2))
    assert [seen["two views"]["values"] for seen in several] == [views] * len(several)
    [said] = several[0]["two views"]["said"]
    assert missing_facts(said, ("loader", 0, "steps", "embeddings", "samples")) == []


def test_processes_agree_on_labels(alone: dict[str, Any], ranks: Seen) -> None:
    """On words; and where nothing can be measured, the values of targets are NaN under the same keys."""
    assert len(alone["names"]) == 6
    for seen in ranks:
        assert seen["names"] == alone["names"]
        assert seen["no targets"].keys() == alone["targets"].keys() - {"val/queries_without_match"}
        assert all(map(math.isnan, values(seen["no targets"]).values()))


NOT_FINITE: tuple[Any, ...] = ("queries", 12, 25, "NaN", "Inf", 1)
NO_EMBEDDINGS: tuple[Any, ...] = ("validation_step", "None", "'embeddings'")


@pytest.mark.parametrize(
    ("how", "map_facts", "j_facts"),
    [("nan", NOT_FINITE, ("batch", "Inf")), ("nothing", NO_EMBEDDINGS, NO_EMBEDDINGS)],
)
def test_a_failure_of_one_process_is_nan_in_both_and_said_by_the_first(
    ranks: Seen, how: str, map_facts: tuple[Any, ...], j_facts: tuple[Any, ...]
) -> None:
    for seen in ranks:
        assert {"val/mAP", "val/recall@1", "val/J"} <= set(seen[how])
        assert all(map(math.isnan, values(seen[how]).values()))
    for said, key, facts in zip(ranks[0][how]["said"], ("mAP", "J"), (map_facts, j_facts), strict=True):
        assert missing_facts(said, (f"val/{key}", "NaN", *facts)) == []
    assert ranks[1][how]["said"] == []


def test_a_strict_error_of_one_process_stops_all(ranks: Seen) -> None:
    """And an error of the embedding of training items in one is one of all, and none waits."""
    assert "ArithmeticError: this process has failed" in ranks[0]["gap fails"]["said"][0]
    for seen in ranks:
        assert math.isnan(seen["gap fails"]["gap/grouped_recall@1"])
        of_strict, of_sanity_check = seen["errors"]
        assert missing_facts(of_strict, NOT_FINITE) == []
        assert missing_facts(of_sanity_check, NO_EMBEDDINGS) == []


def test_a_fit_on_two_processes_keeps_the_best_epoch_of_one(alone: dict[str, Any], ranks: Seen) -> None:
    for seen in ranks:
        assert seen["fit"]["mAP"] == pytest.approx(alone["fit"]["mAP"], rel=1e-6)
        assert seen["fit"]["best"] == alone["fit"]["best"] == "epoch=1.ckpt"
        assert seen["fit"]["J"] == pytest.approx(seen["fit"]["by hand"], rel=1e-5, nan_ok=True)
        assert seen["random is left alone"]
    assert ranks[0]["fit"]["J"] != ranks[1]["fit"]["J"]


def test_dynamics_of_each_process_are_those_of_its_own_episodes_without_a_trace(ranks: Seen, gloo_folder: Path) -> None:
    histories = []
    for seen in ranks:
        assert seen["dynamics"]["weights"] == seen["no dynamics"]["weights"] == ranks[0]["dynamics"]["weights"]
        (history,) = seen["dynamics"]["histories"]
        assert history["steps"] == [2, 4, 6]
        assert all(math.isfinite(value) for value in history["norm_ratio"])
        histories.append(history)
    assert histories[0]["norm_ratio"] != histories[1]["norm_ratio"]
    written = folder_of(gloo_folder, JOBS, 2) / "training_dynamics.json"
    assert json.loads(written.read_text()) == histories[0]  # by the first


def test_a_warning_shows_the_line_of_the_user(alone: dict[str, Any]) -> None:
    """Not the line of the package that warns, which nobody can change."""
    facts = "val", 1, 36, "queries"
    [(file, line)] = [where for *where, words in alone["warned"] if not missing_facts(words, facts)]
    assert file == "train.py"
    assert SCRIPT.splitlines()[line - 1].endswith("# this line is shown")
