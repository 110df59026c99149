"""Settings and metrics are named once, and taken as they are meant; what means nothing, or no input, is one sentence."""

import copy
import inspect
import math
import pickle
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import get_type_hints

import docstring_parser
import numpy as np
import pytest
import torch

from fewshot_callbacks import DEFAULT_METRICS, InputError, RetrievalEvaluation, RetrievalMonitor
from fewshot_callbacks.cli.parsing import parser_of
from fewshot_callbacks.functional import (
    METRICS,
    class_subset,
    discriminant_ratio,
    evaluate_retrieval,
    grouped_recall,
    label_groups,
    near_duplicates,
    nearest,
    plan_evaluation,
    requested_metric,
    sample_episodes,
    suspects,
    variance_ratio,
)
from fewshot_callbacks.functional.retrieval.settings import RetrievalSettings
from fewshot_callbacks.functional.verification import DEFAULT_TRIAL_METRICS, TRIAL_METRICS
from fewshot_callbacks.report import ReportSettings
from fewshot_callbacks.settings import GroupedOptions, RetrievalDefaults, RetrievalOptions, takes
from tests.integration_packages import integration
from tests.messages import refused

ROOT = Path(__file__).parents[3]
ITEMS, LABELS = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 8
SETS = (ITEMS, LABELS)

pytestmark = pytest.mark.usefixtures("as_users_run_it")


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("metrics", "recall@5", ("recall@5",)),
        ("metrics", np.array(["mrr", "eer", "mrr"]), ("mrr", "eer")),
        ("label_groups", np.int64(3), 3),
        ("label_groups", torch.arange(8).view(2, 4), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("seed", torch.tensor(3), 3),
        ("threshold", np.float32(0.5), 0.5),
        ("memory_mb", np.float64(512), None),
        ("device", "auto", "cpu"),
    ],
)
def test_one_value_and_numpys_numbers_are_what_they_mean(name, given, meant):
    options = {"label_groups": "auto" if name == "metrics" else 4} | {name: meant}
    expected = evaluate_retrieval(*SETS, **options)
    assert evaluate_retrieval(*SETS, **(options | {name: given})) == expected
    metric = RetrievalEvaluation(**options | {name: given})
    metric.update(*SETS)
    assert list(metric.compute()) == list(expected.metrics())
    RetrievalMonitor(**options | {name: given})


def test_infinite_memory_is_no_limit_and_none_the_default():
    options = {"label_groups": 4, "metrics": (*DEFAULT_METRICS, "prototype_accuracy"), "max_queries": 30}
    expected, groups = evaluate_retrieval(*SETS, **options), grouped_recall(*SETS, k=np.int64(2), label_groups=4)
    for unlimited in ({"memory_mb": value} for value in (None, math.inf, 10**400)):
        report = evaluate_retrieval(*SETS, **options, **unlimited)
        assert (report, report.memory_note) == (expected, None)
        assert grouped_recall(*SETS, k=(2,), label_groups=4, **unlimited) == groups
        assert torch.equal(nearest(ITEMS, k=3, **unlimited).indices, nearest(ITEMS, k=3).indices)
        assert near_duplicates(ITEMS, min_score=0.5, **unlimited).total > 0
        assert len(suspects(*SETS, k=3, min_probability=0, **unlimited)) == 40
        assert plan_evaluation(100, 100, 8, **unlimited).needed_bytes < 10**8


def test_the_largest_ranks_count_all_candidates():
    keys = ("recall@{}", "ir_recall@{}", "ndcg@{}", "map@{}_min")
    last, all_items = (evaluate_retrieval(*SETS, metrics=[key.format(k) for key in keys]) for k in (2**63 - 1, 40))
    assert list(last.metrics().values()) == list(all_items.metrics().values())


def test_seeds_of_64_bits_and_no_more():
    for seed in (-(2**63), 2**64 - 1):
        assert evaluate_retrieval(*SETS, label_groups=4, seed=seed, max_queries=8).queries == 8
        assert len(class_subset(LABELS, 2, seed=seed)) == 10
    few = {"ways": 2, "queries": 1}
    for call, options in ((class_subset, {"classes": 2}), (label_groups, {"group_size": 4}), (sample_episodes, few)):
        with refused(ValueError, call.__name__, f"seed={2**64}", 0, "-2**63 to 2**64 - 1"):
            call(LABELS, **options, seed=2**64)


def test_neighbours_beyond_any_gallery():
    for search in (nearest, suspects):
        with refused(ValueError, search.__name__, f"k={2**63}", 2**63 - 1, 10):
            search(*SETS, k=2**63)
    assert near_duplicates(ITEMS, min_score=0.5, most=2**70).total > 0


WRONG = [
    ({"metrics": "recal@5"}, ("'recal@5'", "'recall@5'")),
    ({"metrics": "macro_recal@5"}, ("'macro_recal@5'", "'macro_recall@5'")),
    ({"metrics": "recall@0"}, ("'recall@0'", "'recall@1'")),
    ({"metrics": "map@10"}, ("'map@10'", "'map@10_min'")),
    ({"metrics": "Map"}, ("'Map'", "'mAP'")),
    ({"metrics": "map"}, ("'map'", "'mAP'")),
    ({"metrics": "macro_MAP@R"}, ("'macro_MAP@R'", "'macro_map@r'")),
    ({"metrics": "Macro_mAP"}, ("'Macro_mAP'", "'macro_mAP'")),
    ({"metrics": "zzz"}, ("'zzz'", "mAP", "map@r", "eer", "macro_")),
    ({"metrics": "macro_pair_f1"}, ("'macro_pair_f1'", "pair_f1", "query", "'pair_f1'")),
    ({"metrics": 5}, ("metrics", 5, "key", "'recall@1'")),
    ({"metrics": ()}, ("metrics", "empty", "metrics=('mAP',)")),
    ({"metrics": "recall@9223372036854775808"}, ("metrics", "'recall@9223372036854775808'", "2**63 - 1")),
    ({"metrics": "recall@precision95"}, ("metrics", "'recall@precision95'", "(0, 1]", 0.95)),
    ({"metrics": "fnmr@fmr0"}, ("metrics", "'fnmr@fmr0'", "(0, 1]", 0.95)),
    (
        {"metrics": ("grouped_recall@1", "grouped_recall@1_miss")},
        ("metrics", "Grouped Recall", "match", "'grouped_recall@1'", "'grouped_recall@1_miss'"),
    ),
    ({"metrics": "grouped_recall@10"}, ("ranks", "Grouped Recall", "(10,)", "label_groups=10")),
    *(({"label_groups": size}, (f"label_groups={size!r}", "2 labels", "'auto'", None)) for size in ("10", 1, True)),
    ({"label_groups": [[0, 1, 2]]}, ("label_groups", "group", "interval")),
    ({"max_queries": 2.5}, ("max_queries=2.5", "positive", "whole", None)),
    ({"max_queries": 0}, ("max_queries=0", "positive", None)),
    *(({"seed": seed}, (f"seed={seed}", "whole", 0)) for seed in (None, 2**64, -(2**63) - 1, True)),
    ({"memory_mb": float("nan")}, ("memory_mb=nan", "positive", None, 512)),
    ({"memory_mb": "512"}, ("memory_mb='512'", "positive", "MB", None, 512)),
    ({"threshold": "0.5"}, ("threshold='0.5'", "finite", None)),
    *(
        ({"threshold_bounds": bounds}, (f"threshold_bounds={bounds!r}", "(0.0, 1.0)", None))
        for bounds in ((1, 0), 0.5, (0.0, 0.5, 1.0), ("0", "1"), (0.0, math.nan))
    ),
    ({"device": "gpu"}, ("device='gpu'", "'cpu'", "'cuda'", "'auto'")),
    ({"device": "mps"}, ("device='mps'", "float64", "'cpu'", "'cuda'", "'auto'")),
    ({"device": "cuda:97"}, ("device='cuda:97'", f"{torch.cuda.device_count()} CUDA", "'cpu'", "'auto'")),
]


@pytest.mark.parametrize(("settings", "facts"), WRONG)
def test_settings_that_mean_nothing_are_refused_by_each_call(settings, facts):
    for call, sets in ((evaluate_retrieval, SETS), (RetrievalMonitor, ()), (RetrievalEvaluation, ())):
        with refused(ValueError, call.__name__, *facts):
            call(*sets, **settings)


def test_a_wrong_setting_of_the_metric_is_found_at_construction():
    for name, known in (("similarity", ("cosine", "dot", "euclidean")), ("ties", ("expected", "optimistic"))):
        with refused(ValueError, "RetrievalEvaluation", f"{name}='other'", *known):
            RetrievalEvaluation(**{name: "other"})
    with refused(ValueError, "RetrievalEvaluation", "confidence=95", 0, 1, 0.95):
        RetrievalEvaluation(confidence=95)


# ------------------------------------------------------------------------------------------------------ named once

DEFAULTS = {field.name: field.default for field in fields(RetrievalDefaults)}
# Of each setting, the words of its meaning.
MEANINGS = {
    entry.arg_name: (entry.description or "").split()
    for entry in docstring_parser.parse(RetrievalSettings.__doc__).params
}


def test_the_types_of_keywords_are_those_of_the_settings():
    types = {name: kind for name, kind in get_type_hints(RetrievalSettings).items() if name in DEFAULTS}
    assert get_type_hints(RetrievalOptions) == types


@pytest.mark.parametrize("settings", [RetrievalSettings, ReportSettings])
def test_each_setting_has_its_meaning(settings):
    meanings = {entry.arg_name: entry.description for entry in docstring_parser.parse(settings.__doc__).params}
    assert list(meanings) == [field.name for field in fields(settings)]
    assert all(meaning.endswith(".") for meaning in meanings.values())


@pytest.mark.parametrize("target", [evaluate_retrieval, RetrievalMonitor, RetrievalEvaluation, grouped_recall])
def test_signature_and_docstring_show_each_setting(target):
    parameters = inspect.signature(target).parameters
    shown = {entry.arg_name: entry.description.split() for entry in docstring_parser.parse(target.__doc__).params}
    for name, kind in get_type_hints(GroupedOptions if target is grouped_recall else RetrievalOptions).items():
        assert (parameters[name].default, parameters[name].annotation) == (DEFAULTS[name], kind)
        assert shown[name] == MEANINGS[name]
    assert "settings" not in parameters
    assert "**settings" not in target.__doc__


@pytest.mark.parametrize("prepare", [inspect.cleandoc, lambda text: text])
def test_a_docstring_is_read_with_and_without_the_indentation_of_the_source(prepare):
    """Python 3.13 removes it."""

    def search(items, **settings):
        raise NotImplementedError

    search.__doc__ = prepare("""Search.

        Args:
            items: To search.
            **settings: See `RetrievalSettings`.

        Raises:
            ValueError: Always.
        """)
    shown = docstring_parser.parse(takes(GroupedOptions, seed=3)(search).__doc__)
    names = [name for name in DEFAULTS if name in get_type_hints(GroupedOptions)]
    assert [entry.arg_name for entry in shown.params] == ["items", *names]
    assert all(entry.description.split() == MEANINGS[entry.arg_name] for entry in shown.params[1:])
    assert shown.raises[0].description == "Always."
    assert inspect.signature(search).parameters["seed"].default == 3


def test_the_command_line_has_each_metric_and_setting_but_the_confidence_of_its_tables():
    text = " ".join(parser_of("evaluate").format_help().split())
    assert {name for name in DEFAULTS if f"--{name} " in text} == DEFAULTS.keys() - {"confidence"}
    assert " ".join(MEANINGS["label_groups"][:8]) in text
    assert [metric.pattern for metric in METRICS if metric.pattern not in text] == []
    assert f"(default: {DEFAULT_METRICS})" in text
    text = " ".join(parser_of("trials").format_help().split())
    assert [metric.pattern for metric in TRIAL_METRICS if metric.pattern not in text] == []
    assert all(key in text for key in DEFAULT_TRIAL_METRICS)


def test_the_constructor_takes_what_is_meant_and_refuses_what_means_nothing():
    settings = RetrievalSettings(metrics=["mAP", "eer", "mAP"], seed=np.int64(3), threshold=torch.tensor(0.5))
    assert (settings.metrics, settings.seed, settings.threshold) == (("mAP", "eer"), 3, 0.5)
    assert type(settings.seed) is int
    with refused(ValueError, "RetrievalSettings", "label_groups=1", "2 labels"):
        RetrievalSettings(label_groups=1)
    with refused(ValueError, "RetrievalSettings", "'recal@5'", "'recall@5'"):
        replace(settings, metrics="recal@5")


def test_bounds_in_an_array_are_refused_with_their_form():
    with refused(InputError, "RetrievalSettings", "threshold_bounds", "(0.0, 1.0)"):
        RetrievalSettings(threshold_bounds=np.array([0.0, 1.0]))


def test_settings_are_pickled_and_copied_with_what_they_ask_for():
    settings = RetrievalSettings(metrics=("mAP", "eer", "grouped_recall@2"), label_groups=5, threshold=0.5)
    for again in (pickle.loads(pickle.dumps(settings)), copy.deepcopy(settings)):
        assert again == settings
        items = torch.eye(12).repeat(3, 1), torch.arange(12).repeat(3)
        assert evaluate_retrieval(*items, **again.arguments()) == evaluate_retrieval(*items, **settings.arguments())
        assert replace(again, seed=1).metrics == settings.metrics


@pytest.mark.parametrize("call", [evaluate_retrieval, RetrievalMonitor, RetrievalEvaluation])
def test_an_unknown_setting_is_named_with_the_one_that_is_meant(call):
    arguments = SETS if call is evaluate_retrieval else ()
    meant = {
        "metric": ("'metrics'",),
        "galery": ("'gallery'",),
        "zzz": ("similarity", "metrics", "memory_mb"),
    }
    if call is RetrievalEvaluation:  # which has no such argument
        del meant["galery"]
    for name, facts in meant.items():
        for kind in (TypeError, ValueError):  # an unexpected keyword, and a wrong setting
            with refused(kind, call.__name__, f"'{name}'", *facts):
                call(*arguments, **{name: (1,)})


def test_each_metric_has_its_row_and_its_sentence():
    page = (ROOT / "docs/metrics/index.md").read_text(encoding="utf-8")
    for metric in METRICS:
        rate = {"f": "0.001", "o": "0.1"}.get(metric.pattern[0], "0.95")
        key = metric.pattern.format(k="K", divisor="min", p=rate)
        assert re.search(rf"^\|[^|]*`{re.escape(key)}`", page, re.MULTILINE), key
        asked = requested_metric(key.replace("K", "3"))
        assert (asked.metric, asked.meaning[-1], "{" in asked.meaning) == (metric, ".", False)


def test_values_lie_in_their_ranges():
    keys = [metric.pattern.format(k=2, p=0.5, divisor="min") for metric in METRICS]
    keys.remove("grouped_recall@2_miss")  # counts otherwise than grouped_recall@2
    report = evaluate_retrieval(torch.randn(100, 4), torch.arange(100) % 25, metrics=keys)
    for key, value in report.metrics().items():
        low, high = requested_metric(key).metric.range or (-torch.inf, torch.inf)
        assert low <= value <= high, key


# ---------------------------------------------------------------------------------------------------------------- inputs

CALLS = {
    "evaluate_retrieval": lambda items, labels: evaluate_retrieval(items, labels, label_groups=None),
    "grouped_recall": lambda items, labels: grouped_recall(items, labels, label_groups=4),
    "discriminant_ratio": discriminant_ratio,
    "variance_ratio": variance_ratio,
}


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"items": ITEMS.to("meta")}, ("embeddings", "meta", "values")),
        ({"items": ITEMS.to_sparse()}, ("embeddings", "sparse_coo", "embeddings.to_dense()")),
        ({"labels": LABELS.to_sparse()}, ("labels", "sparse_coo", "labels.to_dense()")),
        ({"items": np.array([["0.5", "1"]] * 40)}, ("embeddings", "NumPy", "strings", "(<U3)", "numbers")),
        ({"items": [["a", "b"]] * 40}, ("embeddings", "strings", "'a'", "numbers")),
        ({"items": np.array([["a", 1.0]] * 40, object)}, ("embeddings", "object", "tensor", "'a'")),
        ({"items": [[1.0, 2.0]] * 39 + [[1.0]]}, ("embeddings", "list", "tensor", "length 2", "rows")),
        ({"items": None}, ("embeddings", "NoneType", "tensor")),
        ({"labels": None}, ("labels", "NoneType", "integers", "strings")),
        (
            {"items": ITEMS.to(torch.complex64)},
            ("embeddings", "torch.complex64", "torch.view_as_real(embeddings).flatten(1)"),
        ),
    ],
)
def test_what_holds_no_numbers_is_named_by_each_function(change, facts):
    given = {"items": ITEMS, "labels": LABELS} | change
    for name, call in CALLS.items():
        named = facts
        if name in ("evaluate_retrieval", "grouped_recall"):  # functions on two sets
            named = [fact.replace("embeddings", "queries").replace("labels", "query_labels") for fact in facts]
        with refused(ValueError, name, *named):
            call(given["items"], given["labels"])


def test_codes_of_0_and_255_are_refused_with_both_meanings():
    codes, options = (ITEMS[:6].repeat(1, 3) > 0)[:, :16].byte(), {"similarity": "hamming", "label_groups": None}
    packed, minus_one = np.packbits(codes.numpy(), axis=1), torch.tensor([[1, 255]] * 6).byte()  # it was taken for -1
    both = ("queries > 0", "bit", "np.unpackbits(queries, axis=1)", "byte")
    for given, held in (((codes * 255).numpy(), "0 and 255"), (minus_one, "1 and 255"), (packed, packed.max())):
        with refused(ValueError, "queries", held, *both):
            evaluate_retrieval(given, LABELS[:6] // 2, **options)
    expected = evaluate_retrieval(codes, LABELS[:6] // 2, **options)
    for given in (codes * 255 > 0, np.unpackbits(packed, axis=1)):
        assert evaluate_retrieval(given, LABELS[:6] // 2, **options) == expected


def test_bits_that_sentence_transformers_has_packed_are_refused_with_what_unpacks_them():
    """Its int8 is the byte of 8 bits minus 128: the signs of these numbers are the first of 8 bits alone."""
    quantize = integration("sentence_transformers.util.quantization").quantize_embeddings
    embeddings = np.asarray(torch.randn(60, 64))
    options = {"similarity": "hamming", "label_groups": None, "metrics": ("mAP",)}
    labels = torch.arange(60) % 6
    embeddings = quantize(embeddings, precision="binary")
    with pytest.raises(ValueError, match=r"np\.unpackbits") as refusal:
        evaluate_retrieval(embeddings, labels, **options)
    expression = re.search(r"np\.unpackbits\(.*axis=1\)", str(refusal.value))[0]
    unpacked = eval(expression, {"np": np, "queries": embeddings})
    bits = np.asarray(torch.from_numpy(np.asarray(embeddings).astype(np.int16) + 128))
    assert unpacked.shape == (60, 64)
    assert (np.packbits(unpacked, axis=1) == bits).all()
    assert evaluate_retrieval(unpacked, labels, **options).mAP > 0


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
def test_packed_bits_that_are_compared_as_numbers_are_noted(similarity):
    """Numbers that were quantised to bytes, and pixels, raise no alarm."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(200, 64, generator=generator).numpy()
    packed = np.packbits(numbers > 0, axis=1)
    low, high = numbers.min(0), numbers.max(0)
    quantised = (255 * (numbers - low) / (high - low) - 128).astype(np.int8)
    pixels = np.where(numbers > 1, 200, 0).astype(np.uint8)
    labels = np.arange(200) % 20

    def has_note(embeddings):
        report = evaluate_retrieval(embeddings, labels, similarity=similarity, metrics=("mAP",), label_groups="auto")
        return any("np.unpackbits" in note for note in report.notes)

    assert has_note(packed)
    assert has_note((packed.astype(np.int16) - 128).astype(np.int8))
    assert not has_note(quantised)
    assert not has_note(pixels)
    assert not has_note(numbers)
