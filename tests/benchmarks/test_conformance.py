"""The cases of the agreement of libraries are right, this package agrees in all, and the page shows what they gave."""

import itertools
from fractions import Fraction

import pytest

from tests.messages import missing_facts
from tests.scripts import ROOT, imported_script

IN_TEST_ENVIRONMENT = {
    "scikit-learn": {"ties": ("yes", []), "no_match": ("no rule", []), "negative_scores": ("yes", [])},
    "torchmetrics": {"ties": ("no rule", ["order"]), "negative_scores": ("no", []), "large_k": ("yes", [])},
}
"""Verdicts that the documentation quotes, from libraries that the tests install."""


@pytest.fixture(scope="module")
def conformance():
    with imported_script("benchmarks/conformance.py") as module:
        yield module


def average_precision(relevant):
    found = [place for place, is_relevant in enumerate(relevant, 1) if is_relevant]
    return sum(Fraction(hits, place) for hits, place in enumerate(found, 1)) / len(found)


def values_of_orders(query, label, gallery, labels, metric):
    """The values of all orders that the exact scores allow, best first."""
    scores = [sum(Fraction(a) * Fraction(b) for a, b in zip(query, item, strict=True)) for item in gallery]
    relevant = [other == label for other in labels]
    if not any(relevant):
        return []
    orders = [
        order
        for order in itertools.permutations(range(len(gallery)))
        if all(scores[first] >= scores[second] for first, second in itertools.pairwise(order))
    ]
    ranked = [[relevant[place] for place in order] for order in orders]
    if metric == "ap":
        return sorted(map(average_precision, ranked), reverse=True)
    return [Fraction(sum(row[:5]), 5) for row in ranked]


def searches(case):
    """Each query with what it searches."""
    for number, (query, label) in enumerate(zip(case.queries, case.query_labels, strict=True)):
        if case.gallery is not None:
            yield query, label, case.gallery, case.gallery_labels
        else:
            others = [place for place in range(len(case.queries)) if place != number]
            yield query, label, [case.queries[n] for n in others], [case.query_labels[n] for n in others]


def test_every_value_is_that_of_its_definition(conformance):
    """By trying all orders of items in fractions; the rule of one step is precision where recall rises."""
    for case in conformance.load_cases():
        found = [values_of_orders(*search, case.metric) for search in searches(case)]
        matched = [values for values in found if values]

        def mean(pick, over=None, matched=matched):
            return sum(map(pick, matched)) / Fraction(over or len(matched))

        expected = {
            "by rank": mean(max),
            "exact scores": mean(max),
            "left out": mean(max),
            "counted as 0": mean(max, len(found)),
            "over k": mean(max),
            "counted twice": mean(max),
        }
        if case.name == "ties":
            expected |= {"best order": mean(max), "worst order": mean(min), "one step": Fraction(1, 2)}
            expected["mean over orders"] = mean(lambda values: sum(values) / len(values))
        if case.name == "near_ties":  # in float32 the two items tie
            expected |= {name: conformance.load_cases()[0].values[name] for name in conformance.ANY_ORDER}
        if case.name == "repeated_ids":
            once = [search[2][:2] + search[2][3:] for search in searches(case)]
            expected["counted once"] = values_of_orders([1], 1, once[0], [0, 1, 1], "ap")[0]
        if case.name == "large_k":
            expected["over the items there are"] = Fraction(sum(case.gallery_labels), len(case.gallery))
        assert case.values == {name: expected[name] for name in case.values}, case.name


def test_this_package_follows_its_rules_in_any_order_chunk_and_name(conformance):
    ours = conformance.LIBRARIES[0]
    cases = conformance.load_cases()
    assert len(cases) == 9
    for case in cases:
        verdict = conformance.judge(ours, case)
        assert (verdict.is_right, verdict.changed_by) == ("yes", []), (case.name, verdict)


@pytest.mark.parametrize("name", IN_TEST_ENVIRONMENT)
def test_the_verdicts_of_others_are_those_of_the_page(conformance, name):
    [library] = [library for library in conformance.LIBRARIES if library.name == name]
    cases = {case.name: case for case in conformance.load_cases()}
    found = {case: conformance.judge(library, cases[case]) for case in IN_TEST_ENVIRONMENT[name]}
    assert {case: (verdict.is_right, verdict.changed_by) for case, verdict in found.items()} == IN_TEST_ENVIRONMENT[
        name
    ]


def test_a_wrong_value_an_error_and_a_changing_value_are_found(conformance):
    ties = conformance.load_cases()[0]
    ours = conformance.LIBRARIES[0]

    def judged(evaluate):
        return conformance.judge(conformance.replace(ours, evaluate=evaluate), ties)

    assert judged(lambda case: 0.5).is_right == "no"
    assert judged(lambda case: case.nothing) == conformance.Verdict(["AttributeError"], "no", [])
    assert judged(lambda case: 0.75 if case.chunk is None else 0.5).changed_by == ["chunks"]
    assert judged(lambda case: 0.75 if case.query_labels[0] < 5 else 0.5).changed_by == ["names"]
    assert judged(lambda case: 0.75 if case.gallery_labels[0] < 1 else 0.5).changed_by == ["order", "names"]


def test_a_library_that_is_not_installed_has_a_line_and_the_page_stays(conformance, monkeypatch, capsys):
    page = (ROOT / "docs/metrics/agreement.md").read_text(encoding="utf-8")
    ours = conformance.LIBRARIES[0]
    absent = conformance.replace(ours, name="absent", distribution="no-such-distribution")
    monkeypatch.setattr(conformance, "LIBRARIES", [ours, absent])
    monkeypatch.setattr("sys.argv", ["conformance.py"])
    conformance.main()
    table = capsys.readouterr().out
    assert "| case | fewshot_callbacks |\n" in table
    [line] = [line for line in table.splitlines() if line.startswith("- absent")]
    assert missing_facts(line, ("pip install no-such-distribution",)) == []
    monkeypatch.setattr("sys.argv", ["conformance.py", "--write"])
    with pytest.raises(SystemExit):
        conformance.main()
    error = capsys.readouterr().err.partition("error: ")[2]
    assert missing_facts(error, ("docs/metrics/agreement.md", "pip install no-such-distribution", "--write")) == []
    assert (ROOT / "docs/metrics/agreement.md").read_text(encoding="utf-8") == page


def test_the_page_has_every_case_and_library(conformance):
    page = (ROOT / "docs/metrics/agreement.md").read_text(encoding="utf-8")
    table = page.split(conformance.BEGIN)[1].split(conformance.END)[0]
    assert all(f"- {library.name} " in table for library in conformance.LIBRARIES)
    for case in conformance.load_cases():
        assert f"| {case.title} | yes / yes |" in table  # the column of this package
        assert case.derivation in table
    assert f"fewshot_callbacks {conformance.fewshot_callbacks.__version__}" in table
    assert conformance.COMMAND in table
