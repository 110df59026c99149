"""`linear_probe` on several processes gives what one gives, and refuses calls that differ in all of them."""

import dataclasses

import pytest
import torch

from fewshot_callbacks import Share, linear_probe
from tests.functional.linear_probe.refitted import clusters
from tests.messages import refused
from tests.thread_processes import in_threads

QUERIES, GALLERY = 50, 130
ROWS, LABELS = clusters(QUERIES + GALLERY, 9, 6, offset=3)
TARGETS = ROWS[:, :2] + ROWS.flip(1)[:, :2].square()
GROUPS = torch.arange(QUERIES + GALLERY) ** 2 % 23
WORDS = [f"class {label}" for label in LABELS.tolist()]


def held(rank, count, places, empty):
    """Queries and gallery items of a process: every count-th, in one block, or none."""
    parts = []
    for first, items in ((0, QUERIES), (QUERIES, GALLERY)):
        holders = [each for each in range(count) if each not in empty]
        if rank in empty:
            parts.append(torch.arange(0))
        elif places:
            parts.append(torch.arange(first + holders.index(rank), first + items, len(holders)))
        else:
            parts.append(torch.arange(first, first + items).chunk(len(holders))[holders.index(rank)])
    return parts


def chosen(column, index):
    return [column[n] for n in index.tolist()] if isinstance(column, list) else column[index]


CASES = {
    "integers": (LABELS, False),
    "words": (WORDS, False),
    "many classes": (torch.arange(QUERIES + GALLERY) % 25, False),
    "targets": (TARGETS, False),
    "integers and groups": (LABELS, True),
    "words and groups": (WORDS, True),
    "targets and groups": (TARGETS, True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize(("count", "empty"), [(2, ()), (3, (1,)), (4, (0, 3))])
def test_several_processes_give_what_one_gives(case, places, count, empty):
    column, with_groups = CASES[case]
    everything = (torch.arange(QUERIES), torch.arange(QUERIES, QUERIES + GALLERY))

    def probe(parts, **options):
        queries, gallery = parts
        if with_groups:
            options["query_groups"], options["gallery_groups"] = GROUPS[queries], GROUPS[gallery]
        rows = [ROWS[index] if len(index) else torch.empty(0) for index in parts]  # without items no dimension is known
        return linear_probe(rows[0], chosen(column, queries), rows[1], chosen(column, gallery), **options)

    def work(processes):
        parts = held(processes.rank, count, places, empty)
        return probe(parts, share=Share(processes, *((parts[0], parts[1] - QUERIES) if places else ())))

    expected = probe(everything)
    outcomes = in_threads(count, work)
    for found in outcomes:
        assert not isinstance(found, BaseException), found
        assert found == outcomes[0]
        assert found.strength == expected.strength
        assert found.errors == pytest.approx(expected.errors, rel=1e-10)
        assert found.notes == expected.notes
        exact = expected.classes is not None
        assert found.values == (expected.values if exact else pytest.approx(expected.values, abs=1e-10))
        assert found.intervals == expected.intervals
        counts = ("queries", "queries_without_match", "gallery", "gallery_not_counted", "classes")
        assert [getattr(found, name) for name in counts] == [getattr(expected, name) for name in counts]
        for key, values in expected.per_query.items():
            assert torch.equal(found.per_query[key], values)


def test_no_process_receives_more_than_its_groups():
    """Without groups no item is sent, and with groups about as many to each process."""

    def work(processes, groups=None):
        parts = held(processes.rank, 3, True, ())
        options = {} if groups is None else {"gallery_groups": groups[parts[1]]}
        linear_probe(
            ROWS[parts[0]], LABELS[parts[0]], ROWS[parts[1]], LABELS[parts[1]], share=Share(processes), **options
        )
        return processes.most_received

    assert in_threads(3, work) == [0, 0, 0]
    received = in_threads(3, lambda processes: work(processes, torch.arange(QUERIES + GALLERY)))
    assert all(0 < numbers <= 9 * (GALLERY // 9 + 2) for numbers in received)


def changed(**options):
    return lambda given: given.update(options)


CALLS = [
    (changed(strengths=0.5), ("strengths", "1e-06", "process 0", "[0.5] in process 1")),
    (changed(strengths=-1), ("strengths=-1", "1e-09", "1e+09")),
    (changed(confidence=0.5), ("confidence", "0.95 in process 0", "0.5 in process 1")),
    (changed(gallery_groups=[0] * 65), ("gallery_groups", "left out in process 0", "process 1")),
    (changed(query_labels=[1, 2]), ("25 queries", "2 query_labels")),
    (changed(gallery_labels=["owl"] * 65), ("gallery_labels", "process 1", "list(map(str, map(int, query_labels)))")),
    (
        changed(gallery_labels=torch.ones(65)),
        ("gallery_labels in process 1", "floats", "query_labels in process 0", "gallery_labels.long()"),
    ),
    (changed(queries=torch.ones(25, 4)), ("queries", "9 in process 0", "4 in process 1")),
    (changed(gallery=torch.full((65, 9), torch.nan)), (65, 130, "gallery", "NaN", "Inf", "index 65")),
    (changed(places=[*range(25)]), ("query_places", "left out in process 0", "process 1")),
]


@pytest.mark.parametrize(("change", "facts"), CALLS)
def test_what_one_process_does_otherwise_is_said_by_all_at_once(change, facts):
    def work(processes):
        queries, gallery = held(processes.rank, 2, False, ())
        given = {"queries": ROWS[queries], "query_labels": LABELS[queries]}
        given |= {"gallery": ROWS[gallery], "gallery_labels": LABELS[gallery]}
        if processes.rank:
            change(given)
        share = Share(processes, given.pop("places", None))
        return linear_probe(**given, share=share)

    outcomes = in_threads(2, work)
    assert len({str(outcome) for outcome in outcomes}) == 1, outcomes
    with refused(ValueError, "linear_probe", *facts):
        raise outcomes[0]


def test_numbers_of_targets_that_differ_are_refused():
    def work(processes):
        targets = TARGETS[:, : 1 + processes.rank]
        return linear_probe(ROWS, targets, ROWS, targets, share=Share(processes))

    for outcome in in_threads(2, work):
        with refused(ValueError, "targets", "1 in query_labels in process 0", "2 in gallery_labels in process 1"):
            raise outcome


def test_processes_that_all_hold_nothing_are_told():
    nothing = torch.empty(0, 3), torch.empty(0, dtype=torch.long)
    for outcome in in_threads(2, lambda processes: linear_probe(*nothing, *nothing, share=Share(processes))):
        with refused(ValueError, "linear_probe", "queries", "(0, 3)", "process"):
            raise outcome


def test_a_report_has_no_field_that_depends_on_the_process():
    reports = in_threads(
        2, lambda processes: linear_probe(ROWS, LABELS, ROWS[:90], LABELS[:90], share=Share(processes))
    )
    first, second = map(dataclasses.asdict, reports)
    for per_query in (first.pop("per_query"), second.pop("per_query")):
        assert len(per_query["probe"]) == 2 * len(ROWS)
    assert first == second
