"""The operating points of a report, as marks of its curves."""

import math

from fewshot_callbacks.functional.retrieval import RetrievalReport
from fewshot_callbacks.plots.scores import Mark


def operating_marks(report: RetrievalReport) -> tuple[list[Mark], list[Mark]]:
    """List the operating points of a report: by recall and precision, and by false match and false non-match rate."""
    counts = report.pair_counts
    pooled = {f"decision, F1 {report.decision.f1:.3g}": report.decision}
    pooled |= {f"precision {precision:g}": point for precision, point in report.at_precision.items()}
    marks = [Mark(name, point.threshold, point.recall, point.precision) for name, point in pooled.items()]
    errors = [
        Mark(name, point.threshold, point.false_positives / (counts.irrelevant or math.nan), 1 - point.recall)
        for name, point in pooled.items()
    ]
    for rate, at in report.at_false_match_rate.items():
        accepted, wrong = (1 - at.false_non_match_rate) * counts.relevant, at.false_match_rate * counts.irrelevant
        precision = accepted / (accepted + wrong) if accepted + wrong else math.nan
        marks.append(Mark(f"FMR {rate:g}", at.threshold, 1 - at.false_non_match_rate, precision))
        errors.append(Mark(f"FMR {rate:g}", at.threshold, at.false_match_rate, at.false_non_match_rate))
    return marks, errors
