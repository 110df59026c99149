"""What is set for the whole of PyTorch changes no result: a default device, a default dtype, flushed denormal numbers."""

import dataclasses
import subprocess
import sys
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from fewshot_callbacks import DEFAULT_METRICS, evaluate_retrieval, functional
from fewshot_callbacks.data import EpisodicBatchSampler
from fewshot_callbacks.losses import SoftAveragePrecisionLoss
from fewshot_callbacks.metrics import DiscriminantRatio, RetrievalEvaluation, VarianceRatio
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore
from fewshot_callbacks.protonet import SoftmaxHead, evaluate_episodes
from tests.functional.calls import CALLS_WITH_LABELS, EPISODE_SIZES

ITEMS = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
WIDE = ITEMS.double()
OTHERS = ITEMS + 0.3 * torch.randn(80, 6, generator=torch.Generator().manual_seed(1))
LABELS, IDS, ONE_EACH = torch.arange(80) % 20, torch.arange(80) // 2, torch.arange(80)
WORDS = [f"class {label}" for label in LABELS.tolist()]
CODES, TARGETS = (ITEMS > 0).float() * 2 - 1, torch.nn.functional.one_hot(LABELS, 20)
FIRST, SECOND = (evaluate_retrieval(items, LABELS, label_groups=5) for items in (ITEMS, OTHERS))
EPISODES, SHARES = functional.sample_episodes(LABELS, queries=3, episodes=9), ITEMS[:, 0].sigmoid()
HEAD = SoftmaxHead()
PARAMETERS = {"k": "3", "p": "0.3", "divisor": "found"}
OF_ALL = [metric.pattern.format(**PARAMETERS) for metric in functional.METRICS if not metric.pattern.endswith("miss")]
TRIAL_KEYS = [metric.pattern.format(p=0.3) for metric in functional.TRIAL_METRICS]
MACRO = ["macro_mAP", "macro_auroc"]
EVERYTHING = {"metrics": (*DEFAULT_METRICS, *OF_ALL, *MACRO, "map@5_min", "fnmr@fmr0.01"), "label_groups": 5}
HAMMING = {"similarity": "hamming"}
LISTED = functional.Metric(
    "seven_tenths", "ranks", lambda ranks, ties: [0.7] * len(ranks.relevant), "A list of numbers."
)
# more couples of a relevant item and a negative than the integers that float32 tells apart
MANY_LABELS = (torch.arange(14001) < 5000).long()
ONE, MANY = torch.ones(1, 1).double(), torch.randperm(14001, generator=torch.Generator().manual_seed(0))[:, None] + 1.0
MANY, DOT = MANY.double(), {"similarity": "dot", "label_groups": None}
# torchmetrics would make them on the default device
METRICS = [RetrievalEvaluation(label_groups=5), DiscriminantRatio(), VarianceRatio()]


def of_metric(metric, *more):
    metric.reset()
    metric.update(ITEMS, LABELS, *more)
    return metric.compute()


def stored():
    store = EmbeddingStore()
    for some in (slice(50), slice(50, None)):
        store.append(ITEMS[some], WORDS[some], ids=IDS[some])
    return store.gather()


def loss_and_gradient(similarity):
    vectors = torch.tanh(ITEMS).requires_grad_()
    value = SoftAveragePrecisionLoss(similarity=similarity)(vectors, LABELS)
    return value.detach(), torch.autograd.grad(value, vectors)[0]


CALLS = {
    **{name: partial(call, ITEMS, WORDS) for name, call in CALLS_WITH_LABELS.items()},
    "ratios of float64": lambda: (functional.discriminant_ratio(WIDE, LABELS), functional.variance_ratio(WIDE, LABELS)),
    "all metrics": lambda: evaluate_retrieval(ITEMS, LABELS, **EVERYTHING),
    "all metrics, ties": lambda: evaluate_retrieval(CODES, LABELS, **EVERYTHING),
    "a metric as a list": lambda: evaluate_retrieval(ITEMS, LABELS, metrics=LISTED),
    "many items": lambda: evaluate_retrieval(ONE, [1], MANY, MANY_LABELS, metrics="auroc", **DOT).values,
    "knn_accuracy": lambda: functional.knn_accuracy(ITEMS, LABELS, OTHERS, LABELS, k=(3, 5)),
    "embedding_health": lambda: functional.embedding_health(ITEMS, WORDS),
    "leakage": lambda: vars(
        functional.leakage(FIRST, ITEMS, OTHERS, min_score=0.95, query_ids=ONE_EACH, train_ids=ONE_EACH + 70)
    ),
    "linear_probe": lambda: functional.linear_probe(ITEMS, LABELS, OTHERS, LABELS),
    "a regression": lambda: functional.linear_probe(ITEMS, OTHERS[:, 0], OTHERS, ITEMS[:, 1].tolist()),
    "evaluate_trials": lambda: functional.evaluate_trials(
        SHARES.tolist(), LABELS % 2, metrics=TRIAL_KEYS, folds=IDS % 4
    ),
    "neighbour_overlap": lambda: functional.neighbour_overlap(ITEMS, OTHERS),
    "embedding_movement": lambda: functional.embedding_movement(ITEMS, OTHERS),
    "trial_scores": lambda: functional.trial_scores(ITEMS, IDS[:10], IDS[10:20]),
    "identification": lambda: functional.evaluate_identification(ITEMS, LABELS, OTHERS[:40], LABELS[:40] + 5),
    "compression_costs": lambda: functional.compression_costs(ITEMS, LABELS, dims=[3], metrics=("mAP", "auroc")),
    "of lists": lambda: evaluate_retrieval(ITEMS.tolist(), WORDS, label_groups=[WORDS[:5], WORDS[5:10]]),
    "of arrays": lambda: evaluate_retrieval(WIDE.numpy(), LABELS.numpy(), similarity="euclidean"),
    "of a gallery": lambda: evaluate_retrieval(ITEMS, LABELS, OTHERS, LABELS, query_ids=IDS, gallery_ids=IDS),
    "of a sample": lambda: evaluate_retrieval(ITEMS, LABELS, max_queries=30, similarity="dot", **EVERYTHING),
    "of codes": lambda: evaluate_retrieval(CODES, LABELS, **HAMMING, metrics=("mAP", "auc_pr", "grouped_recall@1")),
    "of label sets": lambda: evaluate_retrieval(CODES, TARGETS, CODES, TARGETS, **HAMMING, metrics=("mAP", "ndcg@5")),
    "generalization_gap": lambda: functional.generalization_gap(FIRST, SECOND),
    "compare_reports": lambda: functional.compare_reports(FIRST, SECOND),
    "near_duplicates, codes": lambda: functional.near_duplicates(CODES, CODES, **HAMMING, min_score=-1),
    "label_groups": lambda: functional.label_groups(LABELS, 5, repeats=2),
    "split_episodes": lambda: functional.split_episodes(ITEMS, LABELS, shots=1, episodes=1),
    "evaluate_episodes": lambda: evaluate_episodes(ITEMS, LABELS, HEAD, EPISODES),
    "summarize_accuracies": lambda: functional.summarize_accuracies(SHARES[:9], EPISODES),
    "mean_interval": lambda: functional.mean_interval([0.5, 0.7]),
    "fixed episodes": lambda: EpisodicBatchSampler(LABELS, **EPISODE_SIZES, fixed=True).hash,
    "losses": lambda: [loss_and_gradient(similarity) for similarity in ("cosine", "euclidean", "hamming")],
    "EmbeddingStore": stored,
    "metrics": lambda: [of_metric(METRICS[0], ONE_EACH), *map(of_metric, METRICS[1:])],
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


# -------------------------------------------------------------------------------------------------------- default dtype

DTYPES = (torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("name", "dtype"), product(CALLS, DTYPES), ids=str)
def test_a_default_dtype_changes_no_bit(name, dtype):
    expected = plain(CALLS[name]())
    torch.set_default_dtype(dtype)
    try:
        found = plain(CALLS[name]())
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == expected


def test_sums_of_more_couples_than_float32_tells_apart_are_those_of_mann_and_whitney():
    rank = MANY[:, 0].argsort().argsort() + 1  # the scores, from the least
    wins = int(rank[MANY_LABELS == 1].sum()) - 5000 * 5001 // 2
    assert CALLS["many items"]() == {"auroc": wins / (5000 * 9001)}


def test_a_list_of_a_users_metric_is_read_in_float64():
    assert set(CALLS["a metric as a list"]().per_query["seven_tenths"].tolist()) == {0.7}


# ------------------------------------------------------------------------------------------------- denormal numbers

FLUSHED = """
import sys
import torch
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.functional import evaluate_retrieval, near_duplicates, nearest

labels = torch.arange(40) % 10
normal = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
mixed = normal.clone()
mixed[:4] *= 1e-41
sets = normal * 1e-41, mixed, normal.double() * 1e-310  # made before anything is flushed
asked = (*DEFAULT_METRICS, "prototype_accuracy", "auc_pr", "eer")


def results(similarity, items):
    report = evaluate_retrieval(items, labels, similarity=similarity, metrics=asked, label_groups=5)
    yield report.metrics(), [values.tolist() for values in report.per_query.values()]
    found = nearest(items, k=3, similarity=similarity)
    yield found.indices.tolist(), found.scores.tolist()
    yield near_duplicates(items, similarity=similarity, min_score=-0.1 if similarity == "euclidean" else 0.1).total
    yield evaluate_retrieval(items, torch.nn.functional.one_hot(labels), similarity=similarity).metrics()


def of_all():
    for as_on_device in (False, True):
        with engine_options(as_on_device=as_on_device):
            for similarity in ("cosine", "dot", "euclidean"):
                for items in sets:
                    yield list(results(similarity, items))


expected, threads = repr(list(of_all())), torch.get_num_threads()
assert torch.set_flush_denormal(True)
found = list(of_all())
assert sys.float_info.min / 2 == 0  # the caller's mode is as it was
assert torch.get_num_threads() == threads
torch.set_flush_denormal(False)  # Python's repr shows a flushed number as zero
assert repr(found) == expected
print("the same")
evaluate_retrieval(torch.zeros(40, 8), labels, progress=lambda *_: torch.set_flush_denormal(True))
"""


def test_flushed_denormal_numbers_change_no_result_and_a_recount_has_an_end():
    """In a process of its own, since it recounted for ever; also where a callback changes the mode in the middle."""
    code = [sys.executable, "-c", FLUSHED]
    done = subprocess.run(code, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "the same\n", done.stderr
    said = "RuntimeError: evaluate_retrieval: the thresholds cannot be settled, since neighbouring scores are"
    assert said in done.stderr
