"""Real processes over gloo, and over a backend that knows no CPU: the report of one process, on every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fewshot_callbacks.functional import discriminant_ratio, evaluate_retrieval
from tests.messages import missing_facts
from tests.metrics import process_jobs
from tests.reports import assert_same


def test_processes_that_share_one_set_give_the_report_of_one_process(on_ranks: list[dict[str, Any]]) -> None:
    alone = evaluate_retrieval(*process_jobs.items(200), **process_jobs.MORE)
    for answers in on_ranks:
        assert_same(alone, answers["sharded"][200])


@pytest.mark.parametrize("name", process_jobs.SHARDS)
def test_shards_of_any_size_give_the_values_of_one_process(on_ranks: list[dict[str, Any]], name: str) -> None:
    embeddings, labels = process_jobs.items()
    alone = evaluate_retrieval(embeddings, labels, **process_jobs.MORE)
    expected = float(discriminant_ratio(embeddings.double(), labels))
    for answers in on_ranks:
        assert_same(alone, answers["sharded"][name])
        assert answers["sharded"][f"J of {name}"] == pytest.approx(expected, rel=1e-12)
    assert len({answers["sharded"][f"J of {name}"] for answers in on_ranks}) == 1


def test_an_error_that_concerns_all_is_the_same_on_every_rank(on_ranks: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="evaluate_retrieval") as alone:
        evaluate_retrieval(torch.ones(1, 5), torch.zeros(1, dtype=torch.int64), **process_jobs.MORE)
    assert missing_facts(str(alone.value), ("the only query", "class", "its label", "two items")) == []
    for answers in on_ranks:
        assert answers["sharded"][1] == str(alone.value)


def test_the_error_of_one_process_is_raised_on_all_ranks(on_ranks: list[dict[str, Any]]) -> None:
    for rank, answers in enumerate(on_ranks):
        kind, message = answers["failing"]["value"]
        assert kind == "InputError"
        assert missing_facts(message, ("evaluate_retrieval", "integer", "query_labels", "torch.float32")) == []
        on_first = ("ArithmeticError", "no more numbers")
        on_others = ("RemoteError", "ArithmeticError: no more numbers")
        assert answers["failing"]["work"] == (on_others if rank else on_first)
        assert answers["failing"]["afterwards"] == list(range(len(on_ranks)))


@pytest.mark.usefixtures("on_ranks")
def test_nothing_holds_a_destroyed_group(gloo_folder: Path) -> None:
    """The threads of a group that is held would live until the interpreter ends, and could abort the process there."""
    assert list((gloo_folder / "tests.metrics.process_jobs").glob("*/* holds its group")) == []
