"""Reports of retrieval compared to the last bit."""

from dataclasses import fields, replace

from fewshot_callbacks.functional.retrieval.operating_points import Enclosure


def shown(report):
    """Everything in a report, to the last bit; but time, memory, and what lies at thresholds that the histogram chose."""
    left_out = ("seconds", "memory_note")
    values = {field.name: getattr(report, field.name) for field in fields(report) if field.name not in left_out}
    area = report.auc_pr if report.pooled else None
    values["pooled"] = report.pooled and replace(report.pooled, auc_pr=Enclosure(0.0, 1.0))
    values["values"] = {name: value for name, value in report.values.items() if name != "auc_pr"}
    values["per_query"] = {name: per_query.tolist() for name, per_query in report.per_query.items()}
    values["query_labels"] = report.query_labels.tolist()
    return repr(values), area


def assert_same(report, other):
    assert not isinstance(other, BaseException), other
    mine, area = shown(report)
    theirs, other_area = shown(other)
    assert mine == theirs
    if area is None:
        return
    counts, other_counts = report.pair_counts, other.pair_counts
    assert (counts.relevant, counts.irrelevant) == (other_counts.relevant, other_counts.irrelevant)
    assert abs(area.value - other_area.value) <= area.error + other_area.error + 1e-12
