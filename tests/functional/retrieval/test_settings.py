"""Settings are named once, and taken as they are meant; what means nothing, settings or inputs, is one clear sentence."""

import inspect
import math
import re
from dataclasses import fields
from typing import get_type_hints

import numpy as np
import pytest
import torch

from fewshot_callbacks import DEFAULT_METRICS, RetrievalEvaluation, RetrievalMonitor
from fewshot_callbacks.cli.options import evaluate
from fewshot_callbacks.functional import (
    class_subset,
    discriminant_ratio,
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
from fewshot_callbacks.functional.retrieval.settings import (
    GONE,
    GroupedOptions,
    RetrievalOptions,
    RetrievalSettings,
    described_settings,
)

LABELS = torch.arange(40) % 8


pytestmark = pytest.mark.usefixtures("as_users_run_it")


def made():
    return torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), LABELS


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("metrics", "recall@5", ("recall@5",)),
        ("metrics", ["mrr", "recall@5", "mrr"], ("mrr", "recall@5")),
        ("metrics", np.array(["mAP", "eer"]), ("mAP", "eer")),
        ("label_groups", np.int64(3), 3),
        ("label_groups", torch.arange(8).view(2, 4), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("max_queries", np.int64(30), 30),
        ("seed", torch.tensor(3), 3),
        ("threshold", np.float32(0.5), 0.5),
        ("memory_mb", np.float64(512), None),
    ],
)
def test_one_value_and_numpys_numbers_are_what_they_mean(name, given, meant):
    options = {"label_groups": 4} | {name: meant}
    expected = evaluate_retrieval(*made(), **options)
    assert evaluate_retrieval(*made(), **(options | {name: given})) == expected
    metric = RetrievalEvaluation(**options | {name: given})
    metric.update(*made())
    assert list(metric.compute()) == list(expected.metrics())
    RetrievalMonitor(**options | {name: given})


def test_one_rank_of_grouped_recall():
    for k in (2, np.int64(2), (2,)):
        assert grouped_recall(*made(), k=k, label_groups=4).at.keys() == {2}


@pytest.mark.parametrize("unlimited", [None, math.inf, 1e300, 10**400])
def test_infinite_memory_is_no_limit_and_none_the_default(unlimited):
    options = {"label_groups": 4, "metrics": (*DEFAULT_METRICS, "prototype_accuracy"), "max_queries": 30}
    report = evaluate_retrieval(*made(), **options, memory_mb=unlimited)
    assert (report, report.memory_note) == (evaluate_retrieval(*made(), **options), None)
    assert grouped_recall(*made(), label_groups=4, memory_mb=unlimited) == grouped_recall(*made(), label_groups=4)
    embeddings = made()[0]
    found, expected = (nearest(embeddings, k=3, memory_mb=memory) for memory in (unlimited, None))
    assert torch.equal(found.indices, expected.indices)
    assert near_duplicates(embeddings, min_score=0.5, memory_mb=unlimited).total > 0
    assert len(suspects(*made(), k=3, min_probability=0, memory_mb=unlimited)) == 40
    assert plan_evaluation(100, 100, 8, memory_mb=unlimited).needed_bytes < 10**8


def test_the_largest_ranks_count_all_candidates():
    keys = ("recall@{}", "ir_recall@{}", "ndcg@{}", "map@{}_min")
    last, all_items = (evaluate_retrieval(*made(), metrics=[key.format(k) for key in keys]) for k in (2**63 - 1, 40))
    assert list(last.metrics().values()) == list(all_items.metrics().values())


def test_seeds_of_64_bits_and_no_more():
    for seed in (-(2**63), 2**64 - 1):
        assert evaluate_retrieval(*made(), label_groups=4, seed=seed, max_queries=8).queries == 8
        assert len(class_subset(LABELS, 2, seed=seed)) == 10
    for call in (
        lambda seed: class_subset(LABELS, 2, seed=seed),
        lambda seed: label_groups(LABELS, 4, seed=seed),
        lambda seed: grouped_recall(*made(), label_groups=4, seed=seed),
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
    assert near_duplicates(made()[0], min_score=0.5, most=2**70).total > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metrics": "recal@5"}, r"there is no metric 'recal@5'; did you mean 'recall@5'\?"),
        ({"metrics": "macro_recal@5"}, r"there is no metric 'macro_recal@5'; did you mean 'macro_recall@5'\?"),
        ({"metrics": "recall@0"}, r"there is no metric 'recall@0'; did you mean 'recall@1'\?"),
        ({"metrics": "recall@05"}, r"there is no metric 'recall@05'; did you mean 'recall@5'\?"),
        ({"metrics": "map@10"}, r"there is no metric 'map@10'; did you mean 'map@10_min'\?"),
        ({"metrics": "map@10_k"}, r"there is no metric 'map@10_k'; did you mean 'map@10_min'\?"),
        ({"metrics": "zzz"}, r"there is no metric 'zzz'. There are mAP, map@r, .*eer, .*, and macro_ before"),
        ({"metrics": "macro_f1"}, r"there is no metric 'macro_f1': f1 has no value for each query.*Ask for 'f1'"),
        ({"metrics": 5}, r"metrics hold 5. Each is the key under which it is logged, such as 'recall@1'"),
        ({"metrics": ()}, r"metrics are empty. Ask for at least one"),
        ({"metrics": None}, r"metrics hold None"),
        (
            {"metrics": "recall@9223372036854775808"},
            r"metrics hold .*8', and ranks end at 2\*\*63 - 1. From the number",
        ),
        (
            {"metrics": "recall@precision95"},
            r"metrics hold 'recall@precision95', but a rate lies in \(0, 1\], such as 0.95",
        ),
        ({"metrics": "fnmr@fmr0"}, r"metrics hold 'fnmr@fmr0', but a rate lies"),
        (
            {"metrics": ("grouped_recall@1", "grouped_recall@1_miss")},
            r"metrics ask for Grouped Recall with and without queries that have no match",
        ),
        ({"metrics": "grouped_recall@10"}, r"the ranks of Grouped Recall, \(10,\), must lie below label_groups=10"),
        ({"label_groups": "10"}, r"label_groups='10' must be a whole number of at least 2 labels"),
        ({"label_groups": 1}, r"label_groups=1 must be a whole number of at least 2 labels"),
        ({"label_groups": True}, r"label_groups=True must be a whole number of at least 2 labels"),
        ({"max_queries": 2.5}, r"max_queries=2.5 must be a positive whole number"),
        ({"max_queries": 0}, r"max_queries=0 must be positive; None evaluates all"),
        ({"seed": None}, r"seed=None must be a whole number"),
        ({"seed": 2**64}, r"seed=18446744073709551616 must be .* from -2\*\*63 to 2\*\*64 - 1"),
        ({"seed": -(2**63) - 1}, r"seed=-9223372036854775809 must be .* from -2\*\*63 to 2\*\*64 - 1"),
        ({"seed": True}, r"seed=True must be a whole number"),
        ({"memory_mb": float("nan")}, r"memory_mb=nan must be positive"),
        ({"memory_mb": "512"}, r"memory_mb='512' must be positive, in MB; None is the default, 512"),
        ({"threshold": "0.5"}, r"threshold='0.5' must be a finite score"),
        ({"threshold_bounds": (1, 0)}, r"threshold_bounds=\(1, 0\) must hold the smallest threshold and the largest"),
        ({"threshold_bounds": 0.5}, r"threshold_bounds=0.5 must hold the smallest"),
        ({"threshold_bounds": (0.0, 0.5, 1.0)}, r"threshold_bounds=\(0.0, 0.5, 1.0\) must hold"),
        ({"threshold_bounds": ("0", "1")}, r"threshold_bounds=\('0', '1'\) must hold"),
        ({"device": "gpu"}, r"device='gpu' is not a device"),
        ({"device": "mps"}, r"device='mps' has no float64"),
        ({"device": "cuda:97"}, r"device='cuda:97', but torch sees \d+ CUDA devices"),
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
        ({"confidence": 95}, r"confidence=95 is not between 0 and 1"),
        ({"similarity": "cosin"}, r"similarity='cosin' is unknown. Choose one of cosine, dot, euclidean"),
        ({"ties": "random"}, r"ties='random' is unknown. Choose one of expected"),
    ],
)
def test_a_wrong_setting_of_the_metric_is_found_at_construction(settings, message):
    with pytest.raises(ValueError, match=message):
        RetrievalEvaluation(**settings)


# ------------------------------------------------------------------------------------------------------ named once

NAMES = {field.name for field in fields(RetrievalSettings)}


def test_types_meanings_and_defaults_are_of_the_same_settings():
    assert get_type_hints(RetrievalOptions).keys() == NAMES
    for name, setting in described_settings().items():
        assert setting.meaning.endswith("."), name
        assert setting.default == getattr(RetrievalSettings(), name)


@pytest.mark.parametrize(
    ("target", "options", "others"),
    [
        (evaluate_retrieval, RetrievalOptions, {}),
        (RetrievalMonitor, RetrievalOptions, {}),
        (RetrievalEvaluation, RetrievalOptions, {}),
        (grouped_recall, GroupedOptions, {}),
    ],
)
def test_signature_and_docstring_show_each_setting(target, options, others):
    parameters, described = inspect.signature(target).parameters, described_settings()
    for name, hint in get_type_hints(options).items():
        assert parameters[name].default == others.get(name, described[name].default)
        assert parameters[name].annotation == hint
        assert f"        {name}: {described[name].meaning.split()[0]} " in target.__doc__
    assert "settings" not in parameters
    assert "**settings" not in target.__doc__


def test_evaluations_have_few_arguments():
    assert len(inspect.signature(evaluate_retrieval).parameters) <= 22
    assert len(inspect.signature(RetrievalMonitor).parameters) <= 24


def test_the_command_line_has_each_setting_but_the_confidence_of_its_tables():
    options = evaluate()
    assert {action.dest for action in options._actions} & NAMES == NAMES - {"confidence"}
    text = " ".join(options.format_help().split())
    assert all(f"--{name}" in text for name in NAMES - {"confidence"})
    assert "Groups of labels for Grouped Recall: the number" in text


@pytest.mark.parametrize("call", [evaluate_retrieval, RetrievalMonitor, RetrievalEvaluation])
@pytest.mark.parametrize("kind", [TypeError, ValueError])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("metric", r"there is no setting 'metric'. Did you mean 'metrics'\?"),
        ("zzz", r"there is no setting 'zzz'. The settings are similarity, metrics, .*memory_mb.*\."),
        *((name, re.escape(f"{name} is no setting. Write {instead}.")) for name, instead in GONE.items()),
    ],
)
def test_an_unknown_setting_is_named_with_the_one_that_is_meant(call, kind, name, words):
    arguments = ([[1.0]], [0]) if call is evaluate_retrieval else ()
    with pytest.raises(kind, match=f"^{call.__name__}: {words}"):
        call(*arguments, **{name: (1,)})


def test_a_misspelt_argument_beside_the_settings_is_found_too():
    with pytest.raises(TypeError, match=r"no setting 'galery'. Did you mean 'gallery'\?"):
        RetrievalMonitor(galery=1)
    with pytest.raises(TypeError, match=r"no setting 'query_id'. Did you mean 'query_ids'\?"):
        evaluate_retrieval([[1.0]], [0], query_id=[0])


# ---------------------------------------------------------------------------------------------------------------- inputs

CALLS = {
    "evaluate_retrieval": lambda items, labels: evaluate_retrieval(items, labels, label_groups=None),
    "grouped_recall": lambda items, labels: grouped_recall(items, labels, label_groups=4),
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
            evaluate_retrieval(given, LABELS[:6], similarity="hamming", label_groups=None)
        assert "Pass embeddings > 0 if each value is a bit" in str(refused.value)
        assert "np.unpackbits(embeddings, axis=1) if each is a byte of 8 bits" in str(refused.value)
    packed, labels = np.packbits(codes.numpy(), axis=1), LABELS[:6] // 2
    expected = evaluate_retrieval(codes, labels, similarity="hamming", label_groups=None)
    for given in (codes * 255 > 0, np.unpackbits(packed, axis=1)):
        assert evaluate_retrieval(given, labels, similarity="hamming", label_groups=None) == expected
    with pytest.raises(ValueError, match=re.escape("np.unpackbits(embeddings, axis=1)")):
        evaluate_retrieval(packed, labels, similarity="hamming")
    minus_one = torch.tensor([[1, 255]] * 6, dtype=torch.uint8)  # -1 as a byte: it was taken for -1
    with pytest.raises(ValueError, match="hold 1 and 255"):
        evaluate_retrieval(minus_one, labels, similarity="hamming")
