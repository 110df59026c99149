"""The cases of recall are right, this package agrees in all, and the page shows what they gave."""

import itertools
from fractions import Fraction

import pytest

from tests.integration_packages import integration
from tests.scripts import ROOT, imported_script


@pytest.fixture(scope="module")
def conformance():
    with imported_script("benchmarks/search_conformance.py") as module:
        yield module


def scores_of(case, query):
    rows = case.queries if case.gallery is None else case.gallery
    return [sum(Fraction(a) * Fraction(b) for a, b in zip(case.queries[query], row, strict=True)) for row in rows]


def nearest_by_ids(case, width, skips_itself):
    """Every list of the nearest items that exact scores allow, for each query, by ids."""
    for query in range(len(case.queries)):
        scores = scores_of(case, query)
        items = [item for item in range(len(scores)) if not (skips_itself and case.gallery is None and item == query)]
        orders = itertools.permutations(items)
        descending = [order for order in orders if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))]
        yield sorted({tuple(int(case.ids[item]) for item in order[:width]) for order in descending})


def share(case, lists, width, over):
    """The mean share of exact lists, one for each query, that is among the first entries of the found ones."""
    parts = []
    for exact, found in zip(lists, case.found, strict=True):
        parts.append(Fraction(len(set(exact) & set(found[:width])), over or len(exact)))
    return sum(parts) / len(parts)


def values_of(case):
    """The value of each rule."""
    left_out = [
        [entry for entry in found if not (case.gallery is None and entry == query)]
        for query, found in enumerate(case.found)
    ]
    alone = [lists[0] for lists in nearest_by_ids(case, case.k, skips_itself=True)]
    first_of_each = [lists[0][:1] for lists in nearest_by_ids(case, 1, skips_itself=True)]
    both = [lists[0] for lists in nearest_by_ids(case, case.columns, skips_itself=False)]
    without_itself = type(case)(**{**vars(case), "found": left_out})
    by_ids = share(without_itself, alone, case.k, None)
    values = dict.fromkeys(("counted once", "not found", "as a set", "as integers", "exact scores"), by_ids)
    values |= {"left out": by_ids, "over the items there are": by_ids, "by ids": by_ids}
    values["over k"] = share(without_itself, alone, case.k, case.k)
    values["counted in both lists"] = share(case, both, case.columns, None)
    values["of the first"] = share(without_itself, first_of_each, case.columns, None)
    if case.name == "ties":
        best = [lists[-1] for lists in nearest_by_ids(case, case.k, skips_itself=True)]
        values["by ids, in another order"] = values["ties count as found"] = share(case, best, case.k, None)
    if case.name == "large_k":
        values["-1 in both lists counts as found"] = Fraction(len({0, -1}), case.k)
    if case.name == "near_ties":  # both items have the score 1 in float32
        values["in float32"] = Fraction(1)
    return values


def test_every_value_is_that_of_its_definition(conformance):
    cases = conformance.load_cases()
    assert len(cases) == 9
    for case in cases:
        assert case.values == {name: values_of(case)[name] for name in case.values}, case.name


def test_this_package_follows_its_rules_in_any_order(conformance):
    for case in conformance.load_cases():
        verdict = conformance.judge(conformance.LIBRARIES[0], case, conformance.variants)
        assert (verdict.is_right, verdict.changed_by) == ("yes", []), (case.name, verdict)


@pytest.mark.parametrize(
    ("name", "module"), [("faiss", "faiss"), ("usearch", "usearch"), ("pytrec_eval", "pytrec_eval")]
)
def test_the_verdicts_of_others_are_those_of_the_page(conformance, name, module):
    integration(module)
    [library] = [library for library in conformance.LIBRARIES if library.name == name]
    page = (
        (ROOT / "docs/metrics/agreement.md")
        .read_text(encoding="utf-8")
        .split(conformance.BEGIN)[1]
        .split(conformance.END)[0]
    )
    column = page.strip().splitlines()[0].removesuffix(" |").split(" | ").index(name)
    for case in conformance.load_cases():
        [row] = [line for line in page.splitlines() if line.startswith(f"| {case.title} | yes")]
        verdict = conformance.judge(library, case, conformance.variants)
        assert row.removesuffix(" |").split(" | ")[column] == conformance.cell(verdict), case.name


def test_the_page_has_every_case_and_library(conformance):
    page = (ROOT / "docs/metrics/agreement.md").read_text(encoding="utf-8")
    table = page.split(conformance.BEGIN)[1].split(conformance.END)[0]
    assert all(f"- {library.name} " in table for library in conformance.LIBRARIES)
    for case in conformance.load_cases():
        assert f"| {case.title} | yes / yes |" in table  # the column of this package
        assert case.derivation in table
    assert conformance.COMMAND in table
