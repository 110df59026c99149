"""What a report notes: collapse, ties, zero vectors, one vector far longer than the others, rates too small to measure."""

import pytest
import torch

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.functional import evaluate_retrieval

COLLAPSED = "The embeddings have collapsed: all are the same vector, and every ranking is at chance level."
LABELS = torch.arange(12) % 3


def rows(distinct: int) -> torch.Tensor:
    """Twelve items of so many different vectors of -1 and +1, spread over the classes."""
    vectors = torch.tensor([[1, 1, 1], [1, -1, 1], [-1, 1, 1], [-1, -1, 1]], dtype=torch.float32)
    return vectors[torch.arange(12) // 3 % distinct]


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "hamming"])
def test_a_collapse_is_one_vector_and_no_more(similarity):
    for distinct in (1, 2, 3, 4):
        notes = evaluate_retrieval(rows(distinct), LABELS, similarity=similarity, label_groups=None).notes
        ties = "12 of 12 queries have relevant items that tie with irrelevant ones."
        assert (COLLAPSED in notes) == (distinct == 1), distinct
        assert (ties in notes) == (distinct > 1), distinct  # of a collapse it goes without saying


def test_ties_are_spoken_of_where_more_than_a_hundredth_of_the_queries_has_some():
    for items, said in ((200, False), (198, True)):
        embeddings = torch.randn(items, 8, generator=torch.Generator().manual_seed(0))
        embeddings[2] = embeddings[0]  # of two classes: each ties for the other of both
        notes = evaluate_retrieval(embeddings, torch.arange(items) // 2, label_groups=None).notes
        assert notes == ((f"2 of {items} queries have relevant items that tie with irrelevant ones.",) if said else ())


def test_a_vector_of_length_zero_is_counted():
    embeddings = torch.randn(12, 4)
    embeddings[[3, 7]] = 0
    notes = evaluate_retrieval(embeddings, LABELS, label_groups=None).notes
    assert "2 embeddings have length zero: their cosine similarity to everything is 0." in notes
    assert not [
        note
        for note in evaluate_retrieval(embeddings, LABELS, similarity="dot", label_groups=None).notes
        if "zero" in note
    ]


@pytest.mark.parametrize(("similarity", "longer", "said"), [
    ("dot", 2000, True), ("euclidean", 2000, True), ("dot", 500, False), ("euclidean", 500, False), ("cosine", 2000, False),
])  # fmt: skip
def test_an_embedding_far_longer_than_the_others_is_named(similarity, longer, said):
    embeddings = torch.nn.functional.normalize(torch.randn(40, 8), dim=1)
    embeddings[17] *= longer
    notes = evaluate_retrieval(embeddings, torch.arange(40) % 4, similarity=similarity, label_groups=None).notes
    told = [note for note in notes if "as long as the median" in note]
    assert len(told) == said
    if said:
        assert told[0].startswith("Gallery row 17 is 2e+03 times as long as the median embedding.")
        assert "diverged batch" in told[0]


def test_one_row_among_zeros_is_not_called_long():
    embeddings = torch.zeros(12, 4)
    embeddings[3] = 1
    notes = evaluate_retrieval(embeddings, LABELS, similarity="dot", label_groups=None).notes
    assert not any("as long as" in note for note in notes)


def test_false_match_rates_below_one_irrelevant_pair_are_named():
    embeddings = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))  # 12 queries, 8 irrelevant items each
    for rates, told in (((1 / 96, 0.1), None), ((0.1, 0.0104), "0.0104"), ((1e-3, 1 / 96, 1e-6), "0.001, 1e-06")):
        report = evaluate_retrieval(embeddings, LABELS, metrics=[f"fnmr@fmr{rate!r}" for rate in rates])
        assert report.pair_counts.irrelevant == 96
        assert report.notes == (() if told is None else (
            "A false match rate below 0.0104 (1 / 96) cannot be measured with 96 irrelevant pairs: at "
            f"{told} the threshold only excludes all of these, and new data may exceed the rate.",
        ))  # fmt: skip


def test_a_false_match_rate_of_a_single_class_needs_no_note():
    report = evaluate_retrieval(
        torch.randn(6, 4), [0] * 6, label_groups=None, metrics=(*DEFAULT_METRICS, "fnmr@fmr0.1")
    )
    assert not [note for note in report.notes if "false match" in note]


def test_irrelevant_pairs_are_counted_for_the_drawn_queries_alone():
    embeddings = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    options = {"label_groups": None, "metrics": (*DEFAULT_METRICS, "fnmr@fmr0.0001"), "max_queries": 10}
    notes = evaluate_retrieval(embeddings, torch.arange(400) % 4, **options).notes
    assert any(
        "0.000333 (1 / 3,000) cannot be measured with 3,000 irrelevant pairs: at 0.0001" in note for note in notes
    )


def test_a_printed_report_has_each_metric_in_a_line_with_its_interval_and_the_notes():
    embeddings = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    report = evaluate_retrieval(embeddings, torch.arange(60) % 20, metrics=(*DEFAULT_METRICS, "eer"))
    first, *lines = str(report).splitlines()
    assert first == "60 queries, 60 gallery items, 20 classes"
    names = [line.split()[0] for line in lines[: len(report.metrics())]]
    assert names == list(report.metrics())
    low, high = report.intervals["mAP"]
    assert lines[0].split() == ["mAP", f"{report.mAP:.4f}", f"({low:.4f}", "to", f"{high:.4f})"]
    assert tuple(lines[len(names) :]) == report.messages
