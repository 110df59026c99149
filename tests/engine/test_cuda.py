"""Results on a device equal the CPU bit for bit; these tests need a device."""

import pytest
import torch

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from tests.engine.cases import KINDS, SIMILARITIES, pooled_case
from tests.reports import assert_same

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device"),
]


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_report_is_that_of_the_cpu(kind, similarity):
    case = pooled_case(kind, similarity)
    asked = (*DEFAULT_METRICS, "recall@precision0.3", "recall@precision0.75", "recall@precision1")
    sets, options = (case["queries"], case["query_labels"]), {"similarity": similarity, "metrics": asked}
    assert_same(evaluate_retrieval(*sets, **options), evaluate_retrieval(*sets, **options, device="cuda"))


def test_embeddings_on_the_device_are_taken_as_they_are():
    embeddings, labels = torch.randn(300, 16), torch.arange(300) % 30
    assert_same(
        evaluate_retrieval(embeddings, labels), evaluate_retrieval(embeddings.cuda(), labels.cuda(), device="cuda")
    )
