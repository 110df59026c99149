"""`BatchRetrievalMetrics` in a real Trainer, alone and in two processes."""

import gc
import inspect

import pytest
import torch

from fewshot_callbacks import evaluate_retrieval
from fewshot_callbacks.integrations import BatchRetrievalMetrics
from tests.gloo_processes import answers
from tests.integration_packages import integration
from tests.integrations.cases import embedded_items, trainer_on

transformers = integration("transformers")
integration("accelerate")
SETTINGS = {"metrics": ("mAP", "recall@1", "pair_f1", "grouped_recall@1"), "label_groups": 2}


def batches(items, size=4):
    """Yield each batch as the Trainer passes it, and whether it is the last."""
    embeddings, labels = items
    parts = list(zip(embeddings.split(size), labels.split(size), strict=True))
    for number, (rows, of_rows) in enumerate(parts, start=1):
        yield transformers.EvalPrediction(rows, of_rows), number == len(parts)


@pytest.mark.parametrize("batched", [True, False])
def test_a_trainer_logs_what_the_whole_set_gives(batched, tmp_path):
    items = embedded_items()
    expected = evaluate_retrieval(*items, **SETTINGS).metrics()
    trainer = trainer_on(items, BatchRetrievalMetrics(output=1, **SETTINGS), tmp_path, batch_eval_metrics=batched)
    for _ in range(2):  # the second evaluation has none of the first
        values = trainer.evaluate()
        assert {name: values[f"eval_{name}"] for name in expected} == expected


def test_two_processes_have_the_values_of_one_and_hold_half_of_the_items(gloo_folder):
    items = embedded_items()
    expected = evaluate_retrieval(*items).metrics()
    for answer in answers(gloo_folder, "tests.integrations.process_jobs", 2):
        assert answer["world"] == 2
        for values in answer["values"]:
            assert {name: values[f"eval_{name}"] for name in expected} == expected
        assert answer["most"] <= -(-len(items[0]) // 2)


def test_only_embeddings_are_held():
    compute_metrics = BatchRetrievalMetrics(output=0)
    for rows, labels in zip(torch.eye(6).split(2), torch.arange(6).split(2), strict=True):
        batch = transformers.EvalPrediction((rows, torch.ones(2, 12_345)), labels)
        assert compute_metrics(batch, compute_result=False) == {}
    del batch
    gc.collect()
    assert not [held for held in gc.get_objects() if isinstance(held, torch.Tensor) and held.shape[-1:] == (12_345,)]


def test_all_batches_are_dropped_after_the_last_also_if_it_is_refused():
    compute_metrics = BatchRetrievalMetrics(metrics=("mAP",))
    lone = transformers.EvalPrediction(torch.eye(3), torch.arange(3))
    with pytest.raises(ValueError, match="none of the 3 queries has another item of its class"):
        compute_metrics(lone, compute_result=True)
    items = embedded_items()
    values = [compute_metrics(batch, compute_result=is_last) for batch, is_last in batches(items)]
    assert values[:-1] == [{}] * (len(values) - 1)
    assert values[-1] == evaluate_retrieval(*items, metrics=("mAP",)).metrics()


def test_an_interrupted_evaluation_is_dropped_by_reset():
    compute_metrics = BatchRetrievalMetrics(metrics=("mAP",))
    items = embedded_items()
    [first, *_] = batches(items)
    compute_metrics(first[0], compute_result=False)
    compute_metrics.reset()
    whole = transformers.EvalPrediction(*items)
    assert compute_metrics(whole) == evaluate_retrieval(*items, metrics=("mAP",)).metrics()


def test_the_trainer_finds_the_argument_that_it_asks_for():
    assert "compute_result" in inspect.signature(BatchRetrievalMetrics()).parameters


@pytest.mark.usefixtures("as_users_run_it")
def test_what_is_wrong_is_said_with_what_to_pass():
    two = transformers.EvalPrediction((torch.eye(2), torch.ones(2, 3)), torch.arange(2))
    with pytest.raises(
        ValueError, match=r"2 outputs other than the loss, of shapes \(2, 2\), \(2, 3\)\. .*\(output=1\)"
    ):
        BatchRetrievalMetrics()(two)
    with pytest.raises(
        ValueError, match=r"output=2, and the model has 2 outputs other than the loss. Pass an index below"
    ):
        BatchRetrievalMetrics(output=2)(two)
    with pytest.raises(ValueError, match="there is no metric 'recal@1'; did you mean 'recall@1'"):
        BatchRetrievalMetrics(metrics=("recal@1",))
    several = transformers.EvalPrediction(torch.eye(2), (torch.arange(2), torch.arange(2)))
    with pytest.raises(ValueError, match=r"label_ids hold 2 arrays.*label_names"):
        BatchRetrievalMetrics()(several)
