"""What is set for the whole of PyTorch, a default device and flushed denormal numbers, changes no result."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.data import ClassBalancedBatchSampler, EpisodicBatchSampler
from fewshot_callbacks.functional import (
    ClassMoments,
    class_subset,
    clustered_mean_interval,
    compare_reports,
    discriminant_ratio,
    evaluate_retrieval,
    generalization_gap,
    grouped_recall,
    label_groups,
    mean_interval,
    near_duplicates,
    nearest,
    paired_difference_interval,
    sample_episodes,
    split_episode,
    split_episodes,
    summarize_accuracies,
    suspects,
    training_dynamics,
    variance_ratio,
    variance_ratio_of_set,
)
from fewshot_callbacks.losses import SoftAveragePrecisionLoss
from fewshot_callbacks.metrics import DiscriminantRatio, RetrievalEvaluation, VarianceRatio
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore

EMBEDDINGS = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
OTHERS = EMBEDDINGS + 0.3 * torch.randn(80, 6, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(80) % 20
WORDS = [f"class {label}" for label in LABELS.tolist()]
CODES = (EMBEDDINGS > 0).float() * 2 - 1
TARGETS = torch.nn.functional.one_hot(LABELS, 20)
IDS = torch.arange(80) // 2
FIRST, SECOND = (evaluate_retrieval(items, LABELS, label_groups=5) for items in (EMBEDDINGS, OTHERS))
EPISODES = sample_episodes(LABELS, queries=3, episodes=9)
EVERYTHING = {
    "metrics": (
        *(*DEFAULT_METRICS, "map@5_min", "ir_recall@5", "precision@5", "ndcg@5", "prototype_accuracy", "macro_mAP"),
        *("auc_pr", "fnmr@fmr0.01", "eer"),
    ),
    "label_groups": 5,
}
METRICS = {  # torchmetrics would make them on the default device
    "RetrievalEvaluation": RetrievalEvaluation(label_groups=5),
    "DiscriminantRatio": DiscriminantRatio(),
    "VarianceRatio": VarianceRatio(),
}


def of_metric(name, *more):
    metric = METRICS[name]
    metric.reset()
    metric.update(EMBEDDINGS, LABELS, *more)
    return metric.compute()


def stored():
    store = EmbeddingStore()
    store.append(EMBEDDINGS[:50], WORDS[:50], ids=IDS[:50])
    store.append(EMBEDDINGS[50:], WORDS[50:], ids=IDS[50:])
    return store.gather()


def loss_and_gradient(similarity):
    vectors = torch.tanh(EMBEDDINGS).requires_grad_()
    value = SoftAveragePrecisionLoss(similarity=similarity)(vectors, LABELS)
    return value.detach(), torch.autograd.grad(value, vectors)[0]


CALLS = {
    "evaluate_retrieval": lambda: evaluate_retrieval(EMBEDDINGS, LABELS, **EVERYTHING),
    "of lists and words": lambda: evaluate_retrieval(EMBEDDINGS.tolist(), WORDS, label_groups=5),
    "of arrays": lambda: evaluate_retrieval(EMBEDDINGS.double().numpy(), LABELS.numpy(), similarity="euclidean"),
    "of a gallery": lambda: evaluate_retrieval(
        EMBEDDINGS, LABELS, OTHERS, LABELS, query_ids=IDS, gallery_ids=IDS, similarity="dot", **EVERYTHING
    ),
    "of a sample": lambda: evaluate_retrieval(EMBEDDINGS, LABELS, max_queries=30, **EVERYTHING),
    "of codes": lambda: evaluate_retrieval(
        CODES, LABELS, similarity="hamming", metrics=(*DEFAULT_METRICS, "auc_pr"), label_groups=5
    ),
    "label sets": lambda: evaluate_retrieval(EMBEDDINGS, TARGETS, metrics=("mAP", "ndcg@5")),
    "label sets, codes": lambda: evaluate_retrieval(CODES, TARGETS, CODES, TARGETS, similarity="hamming"),
    "grouped_recall": lambda: grouped_recall(EMBEDDINGS, LABELS, label_groups=5, repeats=2),
    "grouped_recall, groups": lambda: grouped_recall(EMBEDDINGS, WORDS, label_groups=[WORDS[:5], WORDS[5:10]]),
    "generalization_gap": lambda: generalization_gap(FIRST, SECOND),
    "compare_reports": lambda: compare_reports(FIRST, SECOND),
    "nearest": lambda: nearest(EMBEDDINGS, WORDS, queries=[0, 5, 9], k=3),
    "nearest, gallery": lambda: nearest(EMBEDDINGS, LABELS, gallery=OTHERS, gallery_labels=LABELS, k=3),
    "near_duplicates": lambda: near_duplicates(EMBEDDINGS, min_score=0.8),
    "near_duplicates, codes": lambda: near_duplicates(CODES, CODES, similarity="hamming", min_score=-1),
    "suspects": lambda: suspects(EMBEDDINGS, WORDS, k=4, min_probability=0),
    "discriminant_ratio": lambda: discriminant_ratio(EMBEDDINGS, LABELS),
    "discriminant_ratio, float64": lambda: discriminant_ratio(EMBEDDINGS.double(), WORDS, skip_singletons=True),
    "discriminant_ratio, list": lambda: discriminant_ratio(EMBEDDINGS.tolist(), LABELS.tolist()),
    "variance_ratio": lambda: variance_ratio(EMBEDDINGS, LABELS),
    "variance_ratio, float64": lambda: variance_ratio(EMBEDDINGS.double(), LABELS),
    "variance_ratio_of_set": lambda: variance_ratio_of_set(EMBEDDINGS, LABELS),
    "moments": lambda: ClassMoments.of(EMBEDDINGS, LABELS).merge(ClassMoments.nothing(6)).discriminant_ratio(),
    "class_subset": lambda: class_subset(WORDS, 3, 2),
    "label_groups": lambda: label_groups(LABELS, 5, repeats=2),
    "sample_episodes": lambda: sample_episodes(WORDS, queries=3, episodes=7).indices,
    "split_episode": lambda: split_episode(EMBEDDINGS, LABELS, shots=1),
    "split_episodes": lambda: split_episodes(EMBEDDINGS, LABELS, shots=1, episodes=1),
    "summarize_accuracies": lambda: summarize_accuracies(EMBEDDINGS[:9, 0].sigmoid(), EPISODES),
    "intervals": lambda: (
        mean_interval([0.5, 0.7]),
        clustered_mean_interval(EMBEDDINGS[:, 0].sigmoid(), WORDS),
        paired_difference_interval([0.1, -0.2, 0.3], [0, 1, 1]),
    ),
    "training_dynamics": lambda: training_dynamics(EMBEDDINGS, OTHERS, LABELS, shots=1),
    "class-balanced batches": lambda: list(ClassBalancedBatchSampler(WORDS, classes_per_batch=3, items_per_class=2)),
    "episodes": lambda: list(EpisodicBatchSampler(LABELS, ways=2, shots=1, queries=1, episodes=4)),
    "fixed episodes": lambda: EpisodicBatchSampler(LABELS, ways=2, shots=1, queries=1, episodes=4, fixed=True).hash,
    "cosine loss": lambda: loss_and_gradient("cosine"),
    "euclidean loss": lambda: loss_and_gradient("euclidean"),
    "hamming loss": lambda: loss_and_gradient("hamming"),
    "EmbeddingStore": stored,
    "RetrievalEvaluation": lambda: of_metric("RetrievalEvaluation", torch.arange(80, device="cpu")),
    "DiscriminantRatio": lambda: of_metric("DiscriminantRatio"),
    "VarianceRatio": lambda: of_metric("VarianceRatio"),
}


def plain(value):
    """What a result holds, without its tensors."""
    if isinstance(value, Tensor):
        assert value.device.type == "cpu"
        return (value.dtype, value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.compare}
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else repr(value)


@pytest.mark.parametrize("name", CALLS)
def test_a_default_device_changes_no_result(name):
    expected = plain(CALLS[name]())
    with torch.device("meta"):
        found = CALLS[name]()
        assert torch.empty(0).is_meta  # it is left as it was
    assert plain(found) == expected


# ------------------------------------------------------------------------------------------------- denormal numbers

FLUSHED = """
import itertools, sys
import torch
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.functional import evaluate_retrieval, grouped_recall, near_duplicates, nearest

labels = torch.arange(40) % 10
normal = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
tiny = normal * 1e-41
mixed = normal.clone()
mixed[:4] *= 1e-41
wide = normal.double() * 1e-310


def results():
    for similarity, items in itertools.product(("cosine", "dot", "euclidean"), (tiny, mixed, wide)):
        report = evaluate_retrieval(
            items, labels, similarity=similarity, metrics=(*DEFAULT_METRICS, "prototype_accuracy", "auc_pr", "eer"),
            label_groups=5,
        )
        yield report.metrics()
        yield [values.tolist() for values in report.per_query.values()]
        yield grouped_recall(items, labels, similarity=similarity, label_groups=5).at
        found = nearest(items, k=3, similarity=similarity)
        yield found.indices.tolist(), found.scores.tolist()
        yield near_duplicates(items, similarity=similarity, min_score=-0.1 if similarity == "euclidean" else 0.1).total
        targets = torch.nn.functional.one_hot(labels)
        yield evaluate_retrieval(items, targets, similarity=similarity).metrics()


with engine_options(plain=sys.argv[1] == "plain"):
    expected, threads = repr(list(results())), torch.get_num_threads()
    assert torch.set_flush_denormal(True)
    found = list(results())
assert sys.float_info.min / 2 == 0  # the caller's mode is as it was
assert torch.get_num_threads() == threads
torch.set_flush_denormal(False)  # Python's repr shows a flushed number as zero
assert repr(found) == expected
print("the same")
"""


@pytest.mark.parametrize("road", ["compiled", "plain"])
def test_flushed_denormal_numbers_change_no_result(road):
    """In a process of its own, since it recounted for ever."""
    code = [sys.executable, "-c", FLUSHED, road]
    done = subprocess.run(code, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "the same\n", done.stderr


FLUSHED_WITHIN = """
import torch
from fewshot_callbacks.functional import evaluate_retrieval

evaluate_retrieval(torch.zeros(40, 8), torch.arange(40) % 10, progress=lambda *_: torch.set_flush_denormal(True))
"""


def test_a_recount_has_an_end_whatever_happens_meanwhile():
    """A callback that changes the mode in the middle must not let it count for ever."""
    code = [sys.executable, "-c", FLUSHED_WITHIN]
    done = subprocess.run(code, capture_output=True, text=True, timeout=300, check=False)
    assert (
        "RuntimeError: evaluate_retrieval: the thresholds cannot be settled, since neighbouring scores are"
        in done.stderr
    )
