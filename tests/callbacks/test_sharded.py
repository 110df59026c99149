"""Modules with weights that are sharded across processes: `fully_shard` (FSDP2) and tensor parallelism."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks import sharded_fit_jobs, sharded_jobs
from tests.callbacks.models import are_equal, close
from tests.gloo_processes import answers
from tests.messages import missing_facts


@pytest.fixture(scope="module")
def alone(gloo_folder: Path) -> dict[str, Any]:
    """What one process has seen."""
    (seen,) = answers(gloo_folder, sharded_jobs.__name__, 1)
    return seen


@pytest.fixture(scope="module")
def ranks(gloo_folder: Path) -> list[dict[str, Any]]:
    """What each of two has seen."""
    return answers(gloo_folder, sharded_jobs.__name__, 2)


@pytest.fixture(scope="module")
def more(gloo_folder: Path) -> list[dict[str, Any]]:
    """What each of two has seen of more fits."""
    return answers(gloo_folder, sharded_fit_jobs.__name__, 2)


def slow(*values: str) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def of(how: str, kind: str, request: pytest.FixtureRequest) -> list[Any]:
    """What each process has seen of a kind."""
    ranks = request.getfixturevalue("ranks")
    if how not in ranks[0][kind]:
        ranks = request.getfixturevalue("more")
    return [seen[kind][how] for seen in ranks]


@pytest.mark.parametrize("how", ["sharded", "DTensor", *slow("tensor parallel")])
def test_a_validation_of_a_divided_module_is_that_of_one_process(
    alone: dict[str, Any], request: pytest.FixtureRequest, how: str
) -> None:
    """Seen red: with embeddings that are DTensors, one process waited for ever."""
    assert alone["validate"]["val/knn@5"] < 1
    for seen in of(how, "validate", request):
        assert seen == close(alone["validate"], rel=1e-4)


def test_a_part_of_the_dimensions_is_refused(ranks: list[dict[str, Any]]) -> None:
    """Seen red: the values of half of the dimensions were logged."""
    for seen in ranks:
        assert missing_facts(seen["part"], ("RetrievalMonitor", 1, "loader", 0, "ColwiseParallel", "Replicate()")) == []
        assert seen["functions refuse"]


BIT_IDENTICAL = [
    ("ranks", "sharded"),
    *(pytest.param("more", how, marks=pytest.mark.slow) for how in ("ddp", "sharded", "tensor parallel")),
]


@pytest.mark.parametrize(("jobs", "how"), BIT_IDENTICAL)
def test_a_fit_with_monitors_is_bit_identical_to_one_without(
    request: pytest.FixtureRequest, jobs: str, how: str
) -> None:
    """Seen red: after a monitor's forward pass, FSDP2 took the steps that followed with the weights of before."""
    for seen in request.getfixturevalue(jobs):
        plain, watched = seen["fits"][how]["plain"], seen["fits"][how]["watched"]
        assert are_equal(plain["weights"], watched["weights"])
        assert plain["losses"] == watched["losses"]
        assert math.isfinite(watched["logged"]["dynamics/alpha"])


@pytest.mark.slow
def test_sharded_weights_move_as_those_of_ddp(more: list[dict[str, Any]]) -> None:
    for seen in more:
        ddp, sharded = seen["fits"]["ddp"], seen["fits"]["sharded"]
        assert sharded["watched"]["logged"] == close(ddp["watched"]["logged"], rel=1e-4)
        assert sharded["dynamics"]["steps"] == ddp["dynamics"]["steps"]
        for name in ("norm_ratio", "alpha"):
            assert sharded["dynamics"][name] == pytest.approx(ddp["dynamics"][name], rel=1e-4)


@pytest.mark.parametrize("how", ["tensor parallel", *slow("ddp", "sharded")])
def test_embedding_module_and_protonet_are_those_of_one_process(
    alone: dict[str, Any], request: pytest.FixtureRequest, how: str
) -> None:
    """Seen red: with tensor parallelism each item counted twice, and processes of one group had other batches."""
    for own in of(how, "own", request):
        assert own["loss"] == pytest.approx(alone["own"]["loss"], rel=1e-4)
        for here, expected in zip(own["weights"], alone["own"]["weights"], strict=True):
            assert here.flatten().tolist() == pytest.approx(expected.flatten().tolist(), rel=1e-3, abs=1e-5)
        assert own["proto"] == close(alone["own"]["proto"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("in_one_file", [False, True])
def test_a_resumed_fit_continues_gains_and_dynamics(more: list[dict[str, Any]], in_one_file: bool) -> None:
    for seen in more:
        of_checkpoint = seen["resumed"][in_one_file]
        assert of_checkpoint["is folder"] is not in_one_file
        whole, resumed = of_checkpoint["whole"], of_checkpoint["resumed"]
        assert whole["logged"]["val/mAP_gain"] != 0
        assert resumed["logged"] == close(whole["logged"])
        assert (of_checkpoint["first"]["steps"], resumed["steps"]) == (whole["steps"] // 2, whole["steps"])
        assert are_equal(resumed["weights"], whole["weights"])
