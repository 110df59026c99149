"""Compressed embeddings: each form follows its definition, and is evaluated as if it were passed directly."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.distributed.processes import ALONE
from fewshot_callbacks.functional import (
    METRICS,
    Relevance,
    Share,
    compare_reports,
    compression_costs,
    evaluate_retrieval,
)
from fewshot_callbacks.functional.retrieval.compressed_rows import find_ranges, int8_codes
from fewshot_callbacks.functional.retrieval.compression import Compression
from fewshot_callbacks.functional.retrieval.settings import RetrievalSettings
from fewshot_callbacks.storage import Shards
from tests.cases import examples
from tests.integration_packages import integration
from tests.messages import missing_facts, refused
from tests.thread_processes import in_threads

LABELS = torch.arange(60) % 12
DIM = 10


def points(items=60, seed=0, dim=DIM):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(12, dim, generator=generator)
    return centres[torch.arange(items) % 12] + torch.randn(items, dim, generator=generator)


def int8_by_definition(rows, gallery):
    """The codes of one number after the other, in the arithmetic of float32."""
    codes = np.zeros(rows.shape, np.int8)
    for dimension in range(rows.shape[1]):
        low, high = (np.float32(end(gallery[:, dimension])) for end in (np.min, np.max))
        step = (high - low) / np.float32(255)
        if step == 0:
            step = np.float32(1)
        for item in range(len(rows)):
            level = math.floor((rows[item, dimension] - low) / step)
            codes[item, dimension] = min(max(level, 0), 255) - 128
    return codes


@settings(max_examples=examples(30), deadline=None)
@given(
    items=st.integers(1, 12),
    queries=st.integers(1, 6),
    dim=st.integers(1, 5),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    seed=st.integers(0, 2**16),
)
def test_int8_codes_are_those_of_the_definition(items, queries, dim, dtype, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    gallery = (scale * torch.randn(items, dim, generator=generator)).to(dtype)
    rows = (2 * scale * torch.randn(queries, dim, generator=generator)).to(dtype)
    gallery[:, 0] = gallery[0, 0]  # a constant dimension
    ranges = find_ranges(gallery, dim, ALONE)
    for part in (gallery, rows):
        numbers = part.float() if dtype == torch.float16 else part
        assert int8_codes(part, ranges).tolist() == int8_by_definition(numbers.numpy(), gallery.numpy()).tolist()
    assert int8_codes(gallery, ranges)[:, 0].tolist() == [-128] * items


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_codes_are_those_of_sentence_transformers(dtype):
    integration("sentence_transformers", minversion="6.2")
    quantization = integration("sentence_transformers.util.quantization")
    gallery, queries = points(300).numpy().astype(dtype), 2 * points(80, seed=1).numpy().astype(dtype)
    ranges = find_ranges(torch.from_numpy(gallery), DIM, ALONE)
    for rows in (gallery, queries):
        theirs = quantization.quantize_embeddings(rows, "int8", calibration_embeddings=gallery)
        assert int8_codes(torch.from_numpy(rows), ranges).tolist() == theirs.tolist()


def passed_by_itself(name, queries, gallery):
    """Queries and gallery of a form, and its similarity, written out."""
    size, _, code = name.removeprefix("dims").partition("_") if name.startswith("dims") else (DIM, "", name)
    queries_of_form, gallery_of_form = queries[:, : int(size)], gallery[:, : int(size)]
    if code == "binary":
        return queries_of_form > 0, gallery_of_form > 0, "hamming"
    if code == "int8":
        codes = [int8_by_definition(rows.numpy(), gallery.numpy()) for rows in (queries, gallery)]
        return *(torch.from_numpy(each[:, : int(size)]).float() for each in codes), None
    return queries_of_form, gallery_of_form, None


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
@pytest.mark.parametrize("two_sets", [False, True])
def test_each_form_is_evaluated_as_if_it_were_passed_by_itself(similarity, two_sets):
    queries = points()
    gallery = points(48, seed=1) if two_sets else queries
    sets = (queries, LABELS, gallery, LABELS[:48]) if two_sets else (queries, LABELS)
    options = {"metrics": ("mAP", "recall@1", "macro_mAP", "pair_f1"), "confidence": 0.8, "ties": "pessimistic"}
    report = compression_costs(*sets, dims=(3, 7), similarity=similarity, **options)
    whole = evaluate_retrieval(*sets, similarity=similarity, **options)
    assert report.whole == whole
    bytes_by_form = {name: variant.bytes_per_item for name, variant in report.variants.items()}
    assert bytes_by_form == {
        **{"dims7": 28, "dims3": 12, "int8": 10, "dims7_int8": 7, "dims3_int8": 3},
        **{"binary": 2, "dims7_binary": 1, "dims3_binary": 1},
    }
    assert list(bytes_by_form.values()) == sorted(bytes_by_form.values(), reverse=True)
    assert (report.dims, report.bytes_per_item) == (10, 40)
    for name, variant in report.variants.items():
        queries_of_form, gallery_of_form, other_similarity = passed_by_itself(name, queries, gallery)
        rows = (queries_of_form, LABELS, gallery_of_form, LABELS[:48]) if two_sets else (queries_of_form, LABELS)
        expected = evaluate_retrieval(*rows, similarity=other_similarity or similarity, **options)
        assert variant.report.values == expected.values, name
        assert variant.report.intervals == expected.intervals
        differences = compare_reports(expected, whole, 0.8)
        assert str(variant.differences) == str(differences)


def test_all_dimensions_change_nothing():
    report = compression_costs(points(), LABELS, dims=DIM, codes="int8")
    whole = report.variants[f"dims{DIM}"]
    assert whole.report.values == report.whole.values
    assert whole.bytes_per_item == report.bytes_per_item
    assert all(difference.value == 0 and not difference.is_beyond_chance for difference in whole.differences.values())
    assert report.variants[f"dims{DIM}_int8"].report.values == report.variants["int8"].report.values


@settings(max_examples=examples(10), deadline=None)
@given(exponent=st.integers(-20, 20), seed=st.integers(0, 2**16))
def test_scale_and_order_change_nothing(exponent, seed):
    """A power of two scales without rounding. The bits of codes depend on the scale of no dimension."""
    rows = points()
    order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
    first = compression_costs(rows, LABELS, dims=(4, 8))
    other = compression_costs(2.0**exponent * rows[order], LABELS[order], dims=(8, 4), codes=("binary", "int8"))
    assert list(first.variants) == list(other.variants)
    for name, variant in first.variants.items():
        assert other.variants[name].report.values == pytest.approx(variant.report.values, abs=1e-12)
        for key, difference in variant.differences.items():
            assert other.variants[name].differences[key].interval == pytest.approx(difference.interval, abs=1e-9)


def test_sources_of_all_kinds_give_the_same(tmp_path):
    rows, gallery = points(), points(48, seed=1)
    expected = compression_costs(rows, LABELS, gallery, LABELS[:48], dims=4)
    for name, array in (("queries", rows), ("gallery", gallery)):
        np.save(tmp_path / f"{name}.npy", array.numpy())
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("queries", "gallery")]
    shards = [
        Shards(tmp_path / f"{name}.npy", labels=LABELS[: len(array)].numpy())
        for name, array in zip(("queries", "gallery"), (rows, gallery), strict=True)
    ]
    found = [
        compression_costs(mapped[0], LABELS, mapped[1], LABELS[:48], dims=4, memory_mb=0.01),
        compression_costs(shards[0], gallery=shards[1], gallery_labels=shards[1].labels, dims=4),
        compression_costs(rows.tolist(), LABELS.tolist(), gallery.numpy(), LABELS[:48], dims=4),
        compression_costs(rows.double(), LABELS, gallery.double(), LABELS[:48], dims=4, max_queries=60),
    ]
    for report in found:
        for name, variant in report.variants.items():
            assert variant.report.values == expected.variants[name].report.values
    assert found[-1].bytes_per_item == 80
    half = compression_costs(rows.bfloat16(), LABELS, codes=("int8",))
    assert half.bytes_per_item == 20
    assert (
        half.variants["int8"].report.values
        == compression_costs(rows.bfloat16().float(), LABELS, codes="int8").variants["int8"].report.values
    )


@pytest.mark.parametrize("count", [2, 3])
def test_several_processes_give_what_one_gives_to_the_last_bit(count):
    """One of three holds nothing. The ranges are those of all processes."""
    rows, gallery = points(), 3 * points(48, seed=1)
    expected = compression_costs(rows, LABELS, gallery, LABELS[:48], dims=4)

    def work(processes):
        holders = min(count, 2)
        own = slice(processes.rank, None, holders) if processes.rank < holders else slice(0, 0)
        of_queries, of_gallery = torch.arange(60)[own], torch.arange(48)[own]
        return compression_costs(
            rows[own],
            LABELS[own],
            gallery[own],
            LABELS[:48][own],
            dims=4,
            share=Share(processes, of_queries, of_gallery),
        )

    for report in in_threads(count, work):
        assert isinstance(report, type(expected)), report
        assert report.to_dict() | {"notes": []} == expected.to_dict() | {"notes": []}
        assert report.notes == expected.notes


def test_processes_that_ask_for_other_forms_are_refused():
    def work(processes):
        own = slice(processes.rank, None, 2)
        return compression_costs(points()[own], LABELS[own], dims=4 + processes.rank, share=Share(processes))

    for error in in_threads(2, work):
        assert not missing_facts(str(error), ("compression_costs", "dims", "(4,) in process 0", "(5,) in process 1")), (
            error
        )


def test_ids_groups_relevance_and_metrics_are_passed_on():
    rows = points()
    ids = torch.arange(60) // 2 * 2
    groups = torch.arange(60) % 5
    report = compression_costs(rows, LABELS, query_ids=ids, query_groups=groups, codes="binary", metrics="mAP")
    expected = evaluate_retrieval(
        rows > 0, LABELS, query_ids=ids, query_groups=groups, similarity="hamming", metrics="mAP"
    )
    assert report.variants["binary"].report.values == expected.values
    relevance = Relevance.from_label_sets([[label, 20] if label < 2 else [label] for label in LABELS.tolist()])
    report = compression_costs(rows, relevance=relevance, dims=5, codes=())
    assert (
        report.variants["dims5"].report.values
        == evaluate_retrieval(rows[:, :5], relevance=relevance, metrics=("mAP", "recall@1")).values
    )
    assert report.compared() == ("mAP", "recall@1")


def test_bits_have_no_prototypes_and_groups_of_classes_are_passed_on():
    rows = points()
    keys = ("prototype_accuracy", "grouped_recall@1")
    report = compression_costs(rows, LABELS, metrics=keys, label_groups=3)
    assert list(report.variants["int8"].report.values) == [*keys]
    assert list(report.variants["binary"].report.values) == ["grouped_recall@1"]
    assert "binary" not in str(report).split("\n\n")[0]
    only = compression_costs(rows, LABELS, metrics="prototype_accuracy")
    assert list(only.variants) == ["int8"]


def test_every_metric_has_a_form():
    """Whatever the source of a metric, all forms are evaluated."""
    keys = [metric.pattern.format(k=1, p=0.5, divisor="min") for metric in METRICS if metric.input != "groups"]
    report = compression_costs(points(), LABELS, dims=4, metrics=keys)
    assert {*report.compared()} == {*report.whole.values}


COLUMNS = ["mAP", "bytes", "per", "item", "value", "minus", "whole", "interval", "significant"]


def test_printed_and_stored():
    report = compression_costs(points(), LABELS, dims=4, codes="binary", metrics=("mAP", "pair_f1"))
    first, second = str(report).split("\n\n")
    head, whole, *forms = first.splitlines()
    assert head.split() == COLUMNS
    assert whole.split() == ["whole", "40", f"{report.whole.mAP:.4f}"]
    assert [line.split()[0] for line in forms] == ["dims4", "binary", "dims4_binary"]
    assert forms[0].split()[1:4] == [
        "16",
        f"{report.variants['dims4'].report.mAP:.4f}",
        f"{report.variants['dims4'].differences['mAP'].value:+.4f}",
    ]
    assert second.splitlines()[0].split()[0] == "pair_f1"
    stored = json.loads(json.dumps(report.to_dict()))
    assert stored["variants"]["dims4"]["bytes_per_item"] == 16
    assert stored["variants"]["dims4"]["differences"]["pair_f1"]["interval"] == [None, None]
    assert stored["variants"]["binary"]["similarity"] == "hamming"
    assert stored["metrics"] == report.whole.values
    assert report == compression_costs(points(), LABELS, dims=4, codes="binary", metrics=("mAP", "pair_f1"))
    assert report != compression_costs(points(seed=3), LABELS, dims=4, codes="binary", metrics=("mAP", "pair_f1"))


def test_dimensions_that_codes_cannot_use_are_said():
    rows = points()
    rows[:, 2] = 0.25
    rows[:, 5] = rows[:, 5].abs() + 0.1
    report = compression_costs(rows, LABELS)
    of_numbers, of_bits = report.notes
    assert not missing_facts(of_numbers, (1, "10 dimensions", "gallery", "int8", -128)), of_numbers
    assert not missing_facts(of_bits, (2, "10 bits", "gallery", "mean")), of_bits
    assert str(report).endswith("\n\n".join(report.notes))
    assert compression_costs(rows, LABELS, codes=(), dims=3).notes == ()
    assert compression_costs(points(), LABELS).notes == ()
    collapsed = compression_costs(torch.ones(60, DIM), LABELS)
    assert {variant.report.mAP for variant in collapsed.variants.values()} == {collapsed.whole.mAP}


def test_progress_is_that_of_all_forms_together():
    seen = []
    compression_costs(points(), LABELS, dims=4, codes="int8", progress=lambda done, total: seen.append(done / total))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert any(0.25 <= share < 0.5 for share in seen)


REFUSED = [
    ({"dims": (), "codes": ()}, ("dims", "codes", "dims=(64, 256)", "codes=('int8', 'binary')")),
    ({"dims": 0}, ("dims", 0, "dims=(64, 256)")),
    ({"dims": (4, -1)}, ("dims", -1, "dims=(64, 256)")),
    ({"dims": True}, ("dims", True, "dims=(64, 256)")),
    ({"dims": (4, 5, 4)}, ("dims=(4, 5, 4)", 4, "once")),
    ({"dims": (4, 11, 64)}, ("dims", "11, 64", "10 dimensions")),
    ({"codes": ("int8", "int8")}, ("codes", "'int8'", "once")),
    ({"codes": "ubinary"}, ("codes", "'ubinary'", "'binary'")),
    ({"codes": "INT8"}, ("codes", "'INT8'", "'int8'")),
    ({"codes": ("int4x",)}, ("codes", "'int4x'", "'int8'")),
    ({"codes": ("pq",)}, ("codes", "'pq'", "'int8'", "'binary'")),
    ({"similarity": "hamming"}, ("similarity='hamming'", "binary", "dims", "codes")),
    ({"threshold": 0.5, "metrics": "pair_f1"}, ("threshold=0.5", "scores", "codes=()")),
    (
        {"threshold_bounds": (0, 1), "metrics": "recall@precision0.9"},
        ("threshold_bounds=(0, 1)", "scores", "codes=()"),
    ),
    ({"dim": (4,)}, ("'dim'", "'dims'")),
]


@pytest.mark.parametrize(("options", "facts"), REFUSED)
def test_what_cannot_be_compared_is_refused_with_the_fix(options, facts):
    with refused(ValueError, "compression_costs", *facts):
        compression_costs(points(), LABELS, **options)


@pytest.mark.parametrize(
    ("dims", "codes", "facts"),
    [
        (2.5, (), ("dims", 2.5, "dims=(64, 256)")),
        ("64", (), ("dims", "'64'", "dims=(64, 256)")),
        ((), (8,), ("codes", 8, "'int8'", "'binary'")),
    ],
)
def test_values_of_another_type_are_refused(dims, codes, facts):
    with refused(ValueError, "of_a_caller", *facts):
        Compression.checked("of_a_caller", dims, codes, RetrievalSettings())


def test_numbers_of_numpy_and_lists_are_taken():
    expected = Compression("of_a_caller", (4, 8), ("int8",))
    assert Compression.checked("of_a_caller", np.array([4, 8]), ["int8"], RetrievalSettings()) == expected
    assert Compression.checked("of_a_caller", torch.tensor([4, 8]), "int8", RetrievalSettings()) == expected


def test_what_is_no_embedding_is_refused():
    rows = points()
    rows[3, 2] = math.nan
    with refused(ValueError, "compression_costs", 1, "60 rows", "queries", "NaN", "Inf", "index 3") as caught:
        compression_costs(rows, LABELS)
    assert "evaluate_retrieval" not in str(caught.value)
    with refused(ValueError, "compression_costs", 60, 59, "query_labels"):
        compression_costs(points(), LABELS[1:])
    with refused(ValueError, "dims", 11, "10 dimensions"):
        compression_costs(points().tolist(), LABELS, dims=11)
    with refused(ValueError, "integers", "byte", "'int8'", "codes"):
        compression_costs(torch.randint(-9, 9, (60, 4), dtype=torch.int8), LABELS)
    wide = points().double()
    wide[0, 4] = 1e39
    with refused(ValueError, "dimension 4", "gallery", "1e+39", "float32", "'int8'", "codes"):
        compression_costs(wide, LABELS)
    assert compression_costs(wide, LABELS, codes="binary").variants["binary"].bytes_per_item == 2


def test_a_threshold_holds_for_truncated_embeddings():
    report = compression_costs(points(), LABELS, dims=5, codes=(), metrics="pair_f1", threshold=0.3)
    assert report.variants["dims5"].report.decision.threshold == 0.3
    # of no metric of pairs
    assert list(compression_costs(points(), LABELS, threshold=0.3).variants) == ["int8", "binary"]


@pytest.mark.parametrize(("factor", "shift"), [(1e-200, 0.0), (1.0, 1e9)])
def test_ranges_that_float32_cannot_tell_are_noted(factor, shift):
    rows = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.arange(60) % 6
    noted = compression_costs(rows * factor + shift, labels, codes="int8", metrics="mAP").notes
    assert not all(missing_facts(note, ("8 dimensions", "float32")) for note in noted), noted
    for others in (rows, rows + 100, (rows + 1e9).float()):  # of the last, float32 holds all that there is
        assert not any(
            "float32" in note for note in compression_costs(others, labels, codes="int8", metrics="mAP").notes
        )
