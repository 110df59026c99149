"""A report that was saved and loaded is the same to the last bit; other files are refused, and damage is never read."""

import functools
import math
import struct
import zipfile
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch

from fewshot_callbacks import DEFAULT_METRICS, InputError, evaluate_retrieval
from fewshot_callbacks.functional import METRICS, RetrievalReport, TieRange
from fewshot_callbacks.functional.retrieval import saved_reports
from fewshot_callbacks.functional.retrieval.report import _SAVED_CLASSES
from tests.functional.retrieval.users_metrics import F1_AT_2, LIFT, MEAN_RANK
from tests.messages import refused
from tests.remote_stores import empty_memory

LABELS = torch.arange(120) % 24
WORDS = [f"bird {label} \u00e9\ud800" for label in LABELS.tolist()]
IDS = [f"{index}.jpg" for index in range(120)]
ALL_METRICS = [
    metric.pattern.format(k=3, p=0.1, divisor="min") for metric in METRICS if not metric.pattern.endswith("_miss")
]


def points(noise=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.eye(24)[LABELS] + noise * torch.randn(120, 24, generator=generator)


def with_groups():
    return evaluate_retrieval(points(), WORDS, query_ids=[*IDS[:60], *IDS[:60]], query_groups=torch.arange(120) % 7)


def of_gallery():
    labels = LABELS.flip(0).tolist()
    return evaluate_retrieval(
        points(), LABELS, points(seed=1), labels, query_ids=range(120), gallery_ids=range(120, 240)
    )


def of_label_sets():
    columns = torch.nn.functional.one_hot(LABELS % 6, 6) | torch.nn.functional.one_hot(LABELS % 5, 6)
    return evaluate_retrieval(points(), columns)


def of_users_metrics():
    return evaluate_retrieval(points(), LABELS, metrics=("mAP", F1_AT_2, MEAN_RANK, LIFT, "recall@precision0.05"))


def with_nan():
    """NaN of both signs, infinity and minus zero."""
    report = evaluate_retrieval(points(), [*range(100), *[200] * 20])
    negative_nan = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]
    odd = {"mAP": -0.0, "mrr": math.inf, "map@r": negative_nan}
    return replace(report, values=report.values | odd, tie_ranges={"mAP": TieRange(-math.inf, math.nan)})


CASES = {
    "defaults": lambda: evaluate_retrieval(points(), LABELS),
    "one set with ids and groups": with_groups,
    "a gallery": of_gallery,
    "label sets": of_label_sets,
    "metrics of a user": of_users_metrics,
    "hamming": lambda: evaluate_retrieval(points(1.0) > 0, LABELS, similarity="hamming"),
    "all metrics": lambda: evaluate_retrieval(
        points(), WORDS, metrics=(*DEFAULT_METRICS, *ALL_METRICS, "macro_mAP"), label_groups=6, query_ids=IDS
    ),
    "undefined values": with_nan,
    "a sample, and a broken budget": lambda: evaluate_retrieval(points(), LABELS, max_queries=50, memory_mb=1e-6),
    "slices": lambda: evaluate_retrieval(
        points(), LABELS, slices={"age": LABELS % 2, "camera": ["roof", "d\u00f6r"] * 60}, max_queries=50
    ),
    "ties": lambda: evaluate_retrieval(points().round(), LABELS, metrics=("mAP", "recall@1")),
}


@functools.cache
def report_of(case):
    return CASES[case]()


def leaves(value, place="report"):
    """Place -> type and bits of each number, word and array of a report."""
    if isinstance(value, torch.Tensor | np.ndarray):
        array = np.asarray(value)
        return {place: (type(value), array.dtype, array.shape, array.tobytes())}
    if is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, dict):
        parts = {repr(list(value)): len(value)} | {repr(key): entry for key, entry in value.items()}
    elif isinstance(value, tuple):
        parts = {"length": len(value)} | dict(enumerate(value))
    else:
        return {place: (type(value), struct.pack(">d", value) if isinstance(value, float) else value)}
    found = {place: type(value)}
    for name, part in parts.items():
        found |= leaves(part, f"{place}.{name}")
    return found


def saved(report, folder):
    path = folder / "june.report.npz"
    report.save(path)
    return path


@pytest.mark.parametrize("case", CASES)
def test_every_bit_comes_back(case, tmp_path):
    report = report_of(case)
    loaded = RetrievalReport.load(saved(report, tmp_path))
    assert leaves(loaded) == leaves(report)
    assert loaded == report
    assert str(loaded) == str(report)
    assert loaded.to_dict() == report.to_dict()
    for key in report.values:
        assert loaded.meaning(key) == report.meaning(key)
    if report.classes:
        assert loaded.per_class().keys() == report.per_class().keys()


def test_the_file_runs_nothing_and_is_small(tmp_path):
    path = saved(report_of("all metrics"), tmp_path)
    with np.load(path, allow_pickle=False) as entries:
        assert {entries[name].dtype.kind for name in entries.files} <= set("iufb")
    assert path.stat().st_size < 60_000
    assert [file.name for file in tmp_path.iterdir()] == ["june.report.npz"]


def test_an_address_is_written_and_read():
    with empty_memory():
        report_of("defaults").save("memory://runs/june.report.npz")
        assert RetrievalReport.load("memory://runs/june.report.npz") == report_of("defaults")


def test_an_earlier_report_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = saved(report_of("defaults"), tmp_path)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with refused(OSError, "june.report.npz", "No space left"):
        report_of("ties").save(path)
    monkeypatch.undo()
    assert RetrievalReport.load(path) == report_of("defaults")


def load_or_refuse(content, path):
    path.write_bytes(content)
    try:
        return RetrievalReport.load(path)
    except InputError as error:
        message = str(error)
    assert message.startswith(f"RetrievalReport.load: {path} is ")
    return None


def test_a_cut_file_is_refused(tmp_path):
    content = saved(report_of("ties"), tmp_path).read_bytes()
    for length in (*range(0, len(content), 97), *range(len(content) - 40, len(content))):
        assert load_or_refuse(content[:length], tmp_path / "cut.npz") is None, length


def test_changed_bytes_are_refused_or_change_nothing(tmp_path):
    report = report_of("ties")
    content = saved(report, tmp_path).read_bytes()
    expected = leaves(report)
    directory = content.index(b"PK\x01\x02")
    refusals = 0
    positions = [*range(0, 80), *range(80, directory, 37), *range(directory, len(content))]
    for position in positions:
        for change in (0x01, 0x80, 0xFF):
            changed = bytearray(content)
            changed[position] ^= change
            loaded = load_or_refuse(bytes(changed), tmp_path / "changed.npz")
            refusals += loaded is None
            assert loaded is None or leaves(loaded) == expected, position
    assert refusals > len(positions)


@pytest.mark.parametrize("content", [b"", b"no report", b"PK\x03\x04 broken", b"{}"])
def test_other_files_are_refused(content, tmp_path):
    (tmp_path / "a.npz").write_bytes(content)
    with refused(InputError, "RetrievalReport.load", "a.npz", "not a saved report", "report.save"):
        RetrievalReport.load(tmp_path / "a.npz")


def test_embeddings_are_refused_without_being_read(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", embeddings=np.eye(3), labels=np.arange(3))
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("an array was read"))
    with refused(InputError, "RetrievalReport.load", "a.npz", "archive of other arrays", "fewshot evaluate"):
        RetrievalReport.load(tmp_path / "a.npz")
    with pytest.raises(FileNotFoundError):
        RetrievalReport.load(tmp_path / "b.npz")


def test_another_result_and_a_newer_format_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    saved_reports.save(path, TieRange(0.0, 1.0), _SAVED_CLASSES)
    with refused(InputError, "RetrievalReport.load", "a.npz", "does not contain a RetrievalReport", "report.save"):
        RetrievalReport.load(path)
    monkeypatch.setattr(saved_reports, "FORMAT", 2)
    report_of("ties").save(path)
    monkeypatch.undo()
    with refused(InputError, "a.npz", "newer version", "format 2", "format 1", "Update fewshot_callbacks"):
        RetrievalReport.load(path)


FIELDS_OF_FORMAT_1 = {
    "Attribute": "codes names",
    "Enclosure": "low high",
    "ErrorRatePoint": "threshold false_match_rate false_non_match_rate",
    "Gain": "metric value interval reference is_better confidence is_first",
    "GroupedRecall": "at intervals group_size groups dropped_labels repeats per_group confidence unmatched are_given labels",
    "Interval": "low high",
    "Metric": "pattern input value meaning range better",
    "OperatingPoint": "threshold true_positives false_positives false_negatives",
    "PairCounts": "thresholds true_positives false_positives relevant irrelevant edges relevant_counts irrelevant_counts "
    "tolerance sampled_below",
    "PooledDecisions": "best_f1 at_precision at_threshold at_false_match_rate equal_error_rate auc_pr curve pair_counts "
    "passes auroc",
    "RequestedMetric": "key metric parameters",
    "RetrievalReport": "values pooled consistency grouped intervals tie_ranges confidence queries gallery classes "
    "queries_without_match queries_with_ties queries_with_copies is_estimate similarity ties notes memory_note per_query "
    "query_labels drawn counted label_names slices query_ids_digest gallery_digest gallery_ids_digest users_metrics"
    " seconds gain",
    "ThresholdConsistency": "thresholds labels utility classes_without_pairs",
    "TieRange": "lowest highest",
}


def test_the_format_is_raised_when_fields_change():
    def names(kind):
        return getattr(kind, "_fields", None) or [field.name for field in fields(kind)]

    found = {name: " ".join(names(kind)) for name, kind in _SAVED_CLASSES.items()}
    assert (saved_reports.FORMAT, found) == (1, FIELDS_OF_FORMAT_1), "raise FORMAT, and list the fields anew"
