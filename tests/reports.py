"""Reports of retrieval compared to the last bit."""

from dataclasses import fields, replace

from fewshot_callbacks.functional.retrieval.operating_points import Enclosure


def comparable_values(report):
    """Return a report as text, to the last bit, and its `auc_pr`. Time, memory and the bounds of `auc_pr` are left out."""
    left_out = ("seconds", "memory_note")
    values = {field.name: getattr(report, field.name) for field in fields(report) if field.name not in left_out}
    area = report.auc_pr if report.pooled else None
    values["pooled"] = report.pooled and replace(report.pooled, auc_pr=Enclosure(0.0, 1.0))
    values["values"] = {name: value for name, value in report.values.items() if name != "auc_pr"}
    values["per_query"] = {name: per_query.tolist() for name, per_query in report.per_query.items()}
    values["query_labels"] = report.query_labels.tolist()
    return repr(values), area


def assert_same(report, other):
    """Assert that two reports are equal to the last bit, but for time and memory; `auc_pr` within its errors."""
    assert not isinstance(other, BaseException), other
    values, area = comparable_values(report)
    other_values, other_area = comparable_values(other)
    assert values == other_values
    if area is None:
        return
    counts, other_counts = report.pair_counts, other.pair_counts
    assert (counts.relevant, counts.irrelevant) == (other_counts.relevant, other_counts.irrelevant)
    assert abs(area.value - other_area.value) <= area.error + other_area.error + 1e-12
