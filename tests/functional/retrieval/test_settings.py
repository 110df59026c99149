"""Settings and inputs that ended in an error of NumPy, torch or Python: taken as they are meant, or one clear sentence."""

import math
import re

import numpy as np
import pytest
import torch

from fewshot_callbacks import GeneralizationGapMonitor, RetrievalEvaluation, RetrievalMonitor
from fewshot_callbacks.functional import (
    class_subset,
    discriminant_ratio,
    evaluate_multilabel,
    evaluate_retrieval,
    grouped_recall,
    label_groups,
    near_duplicates,
    nearest,
    plan_evaluation,
    sample_episodes,
    suspects,
    variance_ratio,
)
from fewshot_callbacks.functional.retrieval.settings import in_one_form

LABELS = torch.arange(40) % 8


pytestmark = pytest.mark.usefixtures("as_users_run_it")


def made():
    return torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), LABELS


SCALARS = {
    "recall_k": (5, (5,)),
    "map_k": (10, (10,)),
    "precision_k": (np.int64(3), (3,)),
    "ndcg_k": (torch.tensor(4), (4,)),
    "grouped_k": (np.int32(2), (2,)),
    "precisions": (0.9, (0.9,)),
    "false_match_rates": (np.float32(0.125), (0.125,)),
    "group_size": (np.int64(3), 3),
    "max_queries": (np.int64(30), 30),
    "query_seed": (np.int64(3), 3),
    "group_seed": (np.int64(3), 3),
    "memory_mb": (None, 512),
}
SEVERAL = {
    "recall_k": ((np.int64(5), np.uint8(1)), (5, 1)),
    "map_k": ([np.int64(10), (np.int64(3), "found")], (10, (3, "found"))),
    "precisions": (np.array([0.5, 0.25]), (0.5, 0.25)),
    "false_match_rates": (torch.tensor([0.25, 0.5]), (0.25, 0.5)),
}


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [(name, *values) for cases in (SCALARS, SEVERAL) for name, values in cases.items()],
)
def test_one_value_and_numpys_numbers_are_what_they_mean(name, given, meant):
    options = {"group_size": 4} | {name: meant}
    expected = evaluate_retrieval(*made(), **options)
    report = evaluate_retrieval(*made(), **(options | {name: given}))
    assert report == expected
    assert list(report.metrics()) == list(expected.metrics())
    assert report.to_dict()["metrics"] == expected.to_dict()["metrics"]
    found = in_one_form(name, given)
    assert found == meant
    assert type(found) is type(meant)
    metric = RetrievalEvaluation(**options | {name: given})
    metric.update(*made())
    assert list(metric.compute()) == list(expected.metrics())
    assert getattr(RetrievalMonitor(**({"group_size": 4} | {name: given}))._settings, name) == meant


def test_one_rank_of_the_gap():
    assert GeneralizationGapMonitor(k=2)._settings.recall_k == (2,)
    assert GeneralizationGapMonitor(k=np.int64(2))._settings.grouped_k == (2,)
    assert GeneralizationGapMonitor(memory_mb=None)._settings.memory_mb == 512
    assert grouped_recall(*made(), k=np.int64(2), group_size=4).at.keys() == {2}


def test_no_bound_on_memory_is_the_default():
    assert grouped_recall(*made(), group_size=4, memory_mb=None) == grouped_recall(*made(), group_size=4)
    assert plan_evaluation(100, 100, 8, memory_mb=None) == plan_evaluation(100, 100, 8)


@pytest.mark.parametrize("unlimited", [math.inf, 1e300, 10**400])
def test_infinite_memory_is_no_limit(unlimited):
    options = {"group_size": 4, "prototype_accuracy": True, "max_queries": 30}
    for settings in ({}, options):
        expected = evaluate_retrieval(*made(), **settings)
        report = evaluate_retrieval(*made(), **settings, memory_mb=unlimited)
        assert (report, report.memory_note) == (expected, None)
        assert evaluate_retrieval(*made(), **settings, device_memory_mb=unlimited) == expected
    assert grouped_recall(*made(), group_size=4, memory_mb=unlimited) == grouped_recall(*made(), group_size=4)
    targets = torch.nn.functional.one_hot(LABELS).float()
    embeddings = made()[0]
    assert evaluate_multilabel(embeddings, targets, memory_mb=unlimited) == evaluate_multilabel(embeddings, targets)
    found, expected = (nearest(embeddings, k=3, memory_mb=memory) for memory in (unlimited, None))
    assert torch.equal(found.indices, expected.indices)
    assert near_duplicates(embeddings, at_least=0.5, memory_mb=unlimited).total > 0
    assert len(suspects(*made(), k=3, at_least=0, memory_mb=unlimited)) == 40
    assert plan_evaluation(100, 100, 8, memory_mb=unlimited).needed_bytes < 10**8


def test_the_largest_ranks_count_all_candidates():
    names = ("recall_k", "ir_recall_k", "ndcg_k", "map_k")
    last, all_items = (evaluate_retrieval(*made(), **dict.fromkeys(names, k)) for k in (2**63 - 1, 40))
    expected = {name.replace("@40", "@9223372036854775807"): value for name, value in all_items.metrics().items()}
    assert last.metrics() == expected
    assert last.recall_at[2**63 - 1] == 1.0


def test_seeds_of_64_bits_and_no_more():
    for seed in (-(2**63), 2**64 - 1):
        assert evaluate_retrieval(*made(), group_size=4, group_seed=seed, query_seed=seed, max_queries=8).queries == 8
        assert len(class_subset(LABELS, 2, seed=seed)) == 10
    for call in (
        lambda seed: class_subset(LABELS, 2, seed=seed),
        lambda seed: label_groups(LABELS, 4, seed=seed),
        lambda seed: grouped_recall(*made(), group_size=4, seed=seed),
        lambda seed: sample_episodes(LABELS, ways=2, queries=1, episodes=3, seed=seed),
    ):
        with pytest.raises(
            ValueError, match=r"seed=\d+ must be a whole number, such as 0, from -2\*\*63 to 2\*\*64 - 1"
        ):
            call(2**64)


def test_neighbours_beyond_any_gallery():
    for search in (lambda k: nearest(made()[0], k=k), lambda k: suspects(*made(), k=k)):
        with pytest.raises(
            ValueError, match=r"k=9223372036854775808 must be at most 9223372036854775807. Pass the num"
        ):
            search(2**63)
    assert near_duplicates(made()[0], at_least=0.5, most=2**70).total > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recall_k": "5"}, r"recall_k=\('5',\) must hold positive whole numbers, such as \(1, 5, 10\)"),
        ({"recall_k": None}, r"recall_k=\(None,\) must hold positive whole numbers"),
        ({"recall_k": 2.5}, r"recall_k=\(2.5,\) must hold positive whole numbers"),
        ({"ndcg_k": (True,)}, r"ndcg_k=\(True,\) must hold positive whole numbers"),
        ({"map_k": "found"}, r"map_k=\('found',\) must hold ranks"),
        ({"precisions": "0.9"}, r"precisions=\('0.9',\) must lie in \(0, 1\]"),
        ({"precisions": 95}, r"precisions=\(95,\) must lie in \(0, 1\]"),
        ({"false_match_rates": None}, r"false_match_rates=\(None,\) must lie between 0 and 1"),
        ({"group_size": "10"}, r"group_size='10' must be a whole number of at least 2 labels"),
        ({"max_queries": 2.5}, r"max_queries=2.5 must be a positive whole number"),
        ({"query_seed": None}, r"query_seed=None must be a whole number"),
        (
            {"recall_k": 2**63},
            r"recall_k holds 9223372036854775808, and ranks end at 2\*\*63 - 1. From the number of gallery items on",
        ),
        ({"ndcg_k": (1, 10**30)}, r"ndcg_k holds 10{30}, and ranks end at 2\*\*63 - 1"),
        ({"map_k": ((2**64, "found"),)}, r"map_k holds 18446744073709551616, and ranks end at 2\*\*63 - 1"),
        ({"query_seed": 2**64}, r"query_seed=18446744073709551616 must be .* from -2\*\*63 to 2\*\*64 - 1"),
        ({"group_seed": -(2**63) - 1}, r"group_seed=-9223372036854775809 must be .* from -2\*\*63 to 2\*\*64 - 1"),
        ({"group_seed": True}, r"group_seed=True must be a whole number"),
        ({"memory_mb": float("nan")}, r"memory_mb=nan must be positive"),
        ({"device_memory_mb": float("nan")}, r"device_memory_mb=nan must be positive, in MB; None takes half"),
        ({"memory_mb": "512"}, r"memory_mb='512' must be positive, in MB; None is the default, 512"),
        ({"threshold": "0.5"}, r"threshold='0.5' must be a finite score"),
        ({"threshold_bounds": (1, 0)}, r"threshold_bounds=\(1, 0\) must hold the smallest threshold and the largest"),
        ({"threshold_bounds": 0.5}, r"threshold_bounds=0.5 must hold the smallest"),
        ({"threshold_bounds": (0.0, float("nan"))}, r"threshold_bounds=\(0.0, nan\) must hold the smallest"),
    ],
)
def test_settings_that_mean_nothing(settings, message):
    with pytest.raises(ValueError, match=f"^evaluate_retrieval: {message}"):
        evaluate_retrieval(*made(), **settings)
    with pytest.raises(ValueError, match=f"^RetrievalMonitor: {message}"):
        RetrievalMonitor(**settings)
    with pytest.raises(ValueError, match=f"^RetrievalEvaluation: {message}"):
        RetrievalEvaluation(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recal_k": (1,)}, r"there is no setting 'recal_k'. Did you mean 'recall_k'\?"),
        ({"k": 1}, r"there is no setting 'k'. The settings are .*similarity.*memory_mb"),
        ({"gallery": made()[0]}, r"there is no setting 'gallery'"),
        ({"gallery_ids": LABELS}, r"there is no setting 'gallery_ids'"),
        ({"confidence": 95}, r"confidence=95 is not between 0 and 1"),
        ({"similarity": "cosin"}, r"similarity='cosin' is unknown"),
    ],
)
def test_a_wrong_setting_of_the_metric_is_found_at_construction(settings, message):
    with pytest.raises(ValueError, match=message):
        RetrievalEvaluation(**settings)


# ---------------------------------------------------------------------------------------------------------------- inputs

CALLS = {
    "evaluate_retrieval": lambda items, labels: evaluate_retrieval(items, labels, group_size=None),
    "grouped_recall": lambda items, labels: grouped_recall(items, labels, group_size=4),
    "discriminant_ratio": discriminant_ratio,
    "variance_ratio": variance_ratio,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"items": made()[0].to("meta")}, r"embeddings is a meta tensor, which has a shape but no values"),
        ({"labels": LABELS.to("meta")}, r"labels is a meta tensor, which has a shape but no values"),
        ({"items": made()[0].to_sparse()}, r"embeddings is a tensor of layout sparse_coo.*embeddings.to_dense\(\)"),
        ({"labels": LABELS.to_sparse()}, r"labels is a tensor of layout sparse_coo.*labels.to_dense\(\)"),
        ({"items": np.array([["0.5", "1"]] * 40)}, r"embeddings is a NumPy array of words \(<U3\); expected numbers"),
        ({"items": [["a", "b"]] * 40}, r"embeddings hold words, such as 'a'; expected numbers"),
        (
            {"items": np.array([["a", 1.0]] * 40, object)},
            r"embeddings is .*cannot be converted to a tensor.*could not convert",
        ),
        (
            {"items": [[1.0, 2.0]] * 39 + [[1.0]]},
            r"embeddings is a list that cannot be converted to a tensor.*same length",
        ),
        ({"items": None}, r"embeddings is a NoneType that cannot be converted to a tensor"),
        ({"labels": None}, r"labels is a NoneType; expected a list, array or tensor of integers or words"),
        ({"items": made()[0].to(torch.complex64)}, r"needs floating-point embeddings.*got torch.complex64"),
    ],
)
def test_what_holds_no_numbers_is_one_sentence(call, change, message):
    given = {"items": made()[0], "labels": LABELS} | change
    with pytest.raises(ValueError, match=f"^{call}.*{message}"):
        CALLS[call](given["items"], given["labels"])


def test_codes_of_0_and_255_are_refused_with_both_meanings():
    codes = (torch.randn(6, 16, generator=torch.Generator().manual_seed(0)) > 0).to(torch.uint8)
    for given in (codes * 255, (codes * 255).numpy()):
        with pytest.raises(ValueError, match="embeddings hold 0 and 255") as refused:
            evaluate_retrieval(given, LABELS[:6], similarity="hamming", group_size=None)
        assert "Pass embeddings > 0 if each value is a bit" in str(refused.value)
        assert "np.unpackbits(embeddings, axis=1) if each is a byte of 8 bits" in str(refused.value)
    packed, labels = np.packbits(codes.numpy(), axis=1), LABELS[:6] // 2
    expected = evaluate_retrieval(codes, labels, similarity="hamming", group_size=None)
    for given in (codes * 255 > 0, np.unpackbits(packed, axis=1)):
        assert evaluate_retrieval(given, labels, similarity="hamming", group_size=None) == expected
    with pytest.raises(ValueError, match=re.escape("np.unpackbits(embeddings, axis=1)")):
        evaluate_retrieval(packed, labels, similarity="hamming")
    minus_one = torch.tensor([[1, 255]] * 6, dtype=torch.uint8)  # -1 as a byte: it was taken for -1
    with pytest.raises(ValueError, match="hold 1 and 255"):
        evaluate_retrieval(minus_one, labels, similarity="hamming")
