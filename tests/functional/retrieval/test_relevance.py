"""Relevance as it is given: one road for labels, judgements, grades, ignored items and several labels an item."""

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional import Relevance, Share, evaluate_retrieval
from fewshot_callbacks.functional.retrieval.relevance import judged_items
from tests.cases import examples
from tests.functional.brute_force import orders, rank_metrics
from tests.integration_packages import integration
from tests.messages import missing_facts, refused
from tests.thread_processes import in_threads

METRICS = (
    *rank_metrics(3),
    "pair_precision",
    "pair_recall",
    "pair_f1",
    "pair_threshold",
    "recall@precision0.3",
    "eer",
    "auc_pr",
)


def assert_equal(one, other):
    assert not isinstance(other, BaseException), other
    for name in ("values", "intervals", "queries_without_match", "queries_with_ties", "decision", "at_precision"):
        assert repr(getattr(one, name)) == repr(getattr(other, name)), name  # NaN is NaN
    for name, values in one.per_query.items():
        assert torch.equal(values.nan_to_num(-1), other.per_query[name].nan_to_num(-1)), name


def a_set(seed, n=60, dim=4, classes=7):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.rint(2 * rng.normal(size=(n, dim))).astype(np.float32)), rng.integers(0, classes, n)


@settings(max_examples=examples(12), deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([None, 15]), st.booleans(), st.integers(1, 3))
def test_lists_of_classes_are_labels(seed, two, max_queries, groups, count):
    """Every value, interval and operating point to the last bit, whichever process holds what."""
    embeddings, labels = a_set(seed)
    gallery, gallery_labels = a_set(seed + 1, 50)
    others, rng = (gallery_labels if two else labels), np.random.default_rng(seed)
    lists = [np.flatnonzero(others == label).tolist() for label in labels]
    relevance = Relevance.from_lists(lists, gallery=50 if two else None, clusters=labels)
    sets = {"queries": embeddings} | ({"gallery": gallery} if two else {})
    if groups:
        sets["query_groups"] = torch.arange(60) % 20
        sets |= {"gallery_groups": torch.arange(50) % 20} if two else {}
    named = {"query_labels": labels} | ({"gallery_labels": gallery_labels} if two else {})
    options = {"metrics": METRICS, "max_queries": max_queries}
    truth = evaluate_retrieval(**sets, **named, **options)
    assert_equal(truth, evaluate_retrieval(**sets, relevance=relevance, **options))
    own, held = (rng.integers(0, count, size) for size in (60, 50))

    def work(processes):
        mine, theirs = np.flatnonzero(own == processes.rank), np.flatnonzero(held == processes.rank)
        rows = {name: rows[theirs if name.startswith("gallery") else mine] for name, rows in sets.items()}
        share = Share(processes, mine, theirs if two else None)
        return evaluate_retrieval(**rows, relevance=relevance, share=share, **options)

    for report in in_threads(count, work):
        assert_equal(truth, report)


@pytest.mark.parametrize(("two", "ties"), [(False, "expected"), (True, "optimistic"), (True, "pessimistic")])
def test_label_sets_in_any_form_are_the_same(two, ties):
    embeddings, gallery = (torch.randn(n, 5).sign() for n in (40, 30))
    targets, others = ((torch.rand(n, 6) < 0.3).long() for n in (40, 30))
    gallery, others = (gallery, others) if two else (None, None)
    options = {"metrics": ("mAP", "ndcg@3", "ndcg@100", "ndcg@3_linear", "pair_f1"), "ties": ties}
    truth = evaluate_retrieval(embeddings, targets, gallery, others, **options)
    for form in (
        lambda side: side,
        lambda side: scipy.sparse.csr_matrix(side.numpy()),
        lambda side: [row.nonzero().flatten().tolist() for row in side],
    ):
        relevance = Relevance.from_label_sets(*(None if side is None else form(side) for side in (targets, others)))
        assert_equal(truth, evaluate_retrieval(embeddings, gallery=gallery, relevance=relevance, **options))


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from([1, 2]))
def test_judgements_are_those_of_loops_over_all_documents(seed, k, at_least):
    rng = np.random.default_rng(seed)
    queries, documents = rng.normal(size=(6, 3)), rng.normal(size=(15, 3))
    names, ids = [f"q{n}" for n in range(6)], [*range(100, 115)]
    judged = {
        name: {ids[item]: int(rng.integers(0, 4)) for item in rng.choice(15, 6, replace=False)} for name in names[1:]
    }
    relevance, metrics = Relevance.from_judgements(judged, names, ids, at_least=at_least), rank_metrics(k)
    sets = {"gallery": documents, "relevance": relevance}
    report = evaluate_retrieval(queries, **sets, similarity="dot", metrics=tuple(metrics))
    for row, name in enumerate(names):
        order = np.argsort(-(documents @ queries[row]))
        grades = [judged.get(name, {}).get(ids[item], 0) for item in order]
        grades = [grade if grade >= at_least else 0 for grade in grades]
        wanted = {key: of(grades) if any(grades) else np.nan for key, of in metrics.items()}
        found = {key: float(report.per_query[key][row]) for key in metrics}
        assert found == pytest.approx(wanted, abs=1e-12, nan_ok=True)
    assert report.queries_without_match >= 1


def test_a_relevance_shows_its_numbers_and_what_was_left_out():
    judged = (["a", "a", "b", "z"], [1, 2, 1, 1], [1, 0, 3, 1])
    relevance = Relevance.from_judgements(judged, ["b", "a"], [2, 1], unknown="ignore")
    assert repr(relevance) == "Relevance(2 queries, 2 gallery items, 2 relevant pairs, 0 ignored)"
    assert relevance.unknown == 1
    judged = judged_items(relevance)
    assert (judged.relevant.items.tolist(), judged.grades.tolist()) == ([1, 1], [3.0, 1.0])
    report = evaluate_retrieval(torch.eye(3), relevance=Relevance.from_lists([[1], [0], []]))
    assert str(report).startswith("3 queries, 3 gallery items\nmAP")
    assert not missing_facts(report.notes[0], (1, "3 queries", "match")), report.notes


def judged(judgements, queries=("a",), items=("x",), **options):
    return Relevance.from_judgements(judgements, queries, items, **options)


JUDGED, SETS = {"a": {"x": 1}}, Relevance.from_label_sets
JUDGEMENTS, LISTS, LABEL_SETS = (f"Relevance.from_{form}" for form in ("judgements", "lists", "label_sets"))
WRONG = [
    (lambda: judged(JUDGED, ["b"]), (JUDGEMENTS, "query", "'a'", 1, "unknown='ignore'")),
    (lambda: judged(JUDGED, items=["y"]), (JUDGEMENTS, "item", "'x'", 1, "unknown='ignore'")),
    (lambda: judged(JUDGED, ["a", "a"]), (JUDGEMENTS, "query_ids", "'a'", 0, 1)),
    (lambda: judged(JUDGED, unknown="?"), (JUDGEMENTS, "unknown='?'", "'error'", "'ignore'")),
    (lambda: judged((["a"], ["x"], [np.inf])), (JUDGEMENTS, "1 grade", "inf", "finite")),
    (lambda: judged((["a"], ["x"], [np.nan])), (JUDGEMENTS, "1 grade", "nan", "finite")),
    (lambda: judged(JUDGED, at_least=np.nan), (JUDGEMENTS, "at_least=nan", "positive", 1)),
    (lambda: judged(JUDGED, at_least=0), (JUDGEMENTS, "at_least=0", "positive", "grade of 0")),
    (lambda: judged(JUDGED, at_least="a"), (JUDGEMENTS, "at_least", "'a'", "number")),
    (lambda: judged(([1, "1"], ["x", "x"]), [1]), (JUDGEMENTS, "query", "'1'", 1, "strings", "integers")),
    (lambda: judged(([2**63, 2**63 - 1], ["x", "x"]), [2**63]), (JUDGEMENTS, "query", 2**63 - 1)),
    (lambda: judged((["a", "a\0"], ["x", "x"])), (JUDGEMENTS, "query", r"'a\x00'")),
    (lambda: Relevance.from_lists([[1], [0]], grades=[["much"], [1]]), (LISTS, "grade", "'much'", "number")),
    (lambda: Relevance.from_lists([[1], [0]], grades=[[0], [1]]), (LISTS, "1 grade", 0, "positive")),
    (lambda: Relevance.from_lists([[]], gallery=-1), (LISTS, "gallery", -1, "gallery=len(...)")),
    (lambda: Relevance.from_lists([[]], gallery=2.5), (LISTS, "gallery", 2.5, "gallery=len(...)")),
    (lambda: Relevance.from_lists([[0]], gallery=np.eye(3)), (LISTS, "gallery", "an ndarray", "gallery=len(...)")),
    (lambda: judged({"a": {"x": "much"}}), (JUDGEMENTS, "grade", "'much'", "number")),
    (lambda: judged((["a", "a"], ["x", "x"], [1, 2])), (JUDGEMENTS, "1 pair has", "query 'a'", "item 'x'", "grades")),
    (lambda: judged((["a"], ["x", "x"])), (JUDGEMENTS, "lengths", "1, 2")),
    (
        lambda: Relevance.from_lists([[0]], [[0]], gallery=2),
        (LISTS, "1 pair is", "relevant", "ignored", "query 0", "item 0"),
    ),
    (lambda: Relevance.from_lists([[2]], gallery=2), (LISTS, "relevant[0]", 2, "2 gallery items", 0)),
    (lambda: Relevance.from_lists([[0.5]], gallery=2), (LISTS, "relevant[0]", "float64", "indices")),
    (lambda: Relevance.from_lists([[1, 1]], gallery=2), (LISTS, "relevant[0]", "twice")),
    (lambda: Relevance.from_lists([[1]], [], gallery=2), (LISTS, "1 list", "relevant", 0, "ignored")),
    (lambda: Relevance.from_lists([[1]], gallery=2, grades=[[]]), (LISTS, "grades", "relevant", "item")),
    (lambda: Relevance.from_lists([[1]], gallery=2, clusters=[0, 1]), (LISTS, "clusters", "(2,)", "1 query")),
    (lambda: SETS(torch.tensor([[0, 2]])), (LABEL_SETS, 1, "2 entries", "targets", 0)),
    (lambda: SETS([[0, 0]]), (LABEL_SETS, "targets[0]", "label", "twice")),
    (lambda: SETS(["sky", "sea"]), (LABEL_SETS, "targets[0]", "'sky'", "['sky']", "[]")),
    (lambda: SETS([None, ["sky"]]), (LABEL_SETS, "targets[0]", None, "['sky']", "[]")),
    (lambda: SETS([0.5, ["sky"]]), (LABEL_SETS, "targets[0]", 0.5, "['sky']", "[]")),
    (lambda: SETS([3, 4]), (LABEL_SETS, "targets[0]", 3, "[3]", "[]")),
    (lambda: SETS([["sky"], ["sea", None]]), (LABEL_SETS, "targets[1]", None, "str(label)")),
    (lambda: SETS([["sky"], [("sky", "sea")]]), (LABEL_SETS, "targets[1]", "('sky', 'sea')", "str(label)")),
    (lambda: SETS([[0.5]]), (LABEL_SETS, "targets[0]", 0.5, "str(label)")),
    (lambda: SETS([[1], ["1"]]), (LABEL_SETS, "targets[1]", "'1'", "targets[0]", 1, "str(label)")),
    (lambda: SETS([["sky"]], torch.eye(2)), (LABEL_SETS, "targets[0]", "'sky'", "gallery_targets[0]", 0)),
    (lambda: SETS(torch.ones(2, 3), torch.ones(2, 4)), (LABEL_SETS, "targets", "3 labels", "gallery_targets", 4)),
    (lambda: SETS(torch.ones(3)), (LABEL_SETS, "targets", "(3,)", "(items, labels)")),
]


@pytest.mark.parametrize(("make", "facts"), WRONG)
def test_judgements_lists_and_sets_that_cannot_be_are_refused(make, facts):
    with refused(ValueError, *facts):
        make()


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"query_labels": [0, 0, 1]}, ("relevance", "labels", "both")),
        (
            {"relevance": {0: [1]}},
            ("relevance", "dict", "Relevance.from_judgements(judgements, query_ids, gallery_ids)"),
        ),
        ({"relevance": Relevance.from_lists([[1], [0]])}, ("relevance", "2 queries", "3 queries")),
        (
            {"relevance": Relevance.from_lists([[1], [0], []], gallery=3)},
            ("relevance", "3 queries", "3 gallery items", "one set"),
        ),
        ({"relevance": Relevance.from_lists([[], [], []])}, ("3 queries", "relevant", "candidate")),
        ({"metrics": ("mAP", "macro_mAP")}, ("macro_mAP", "labels", "relevance")),
        ({"metrics": "opis@fmr0.1"}, ("opis@fmr0.1", "labels", "relevance")),
    ],
)
def test_relevance_that_does_not_fit_an_evaluation_is_refused(arguments, facts):
    with refused(ValueError, "evaluate_retrieval", *facts):
        evaluate_retrieval(torch.eye(3), **{"relevance": Relevance.from_lists([[1], [0], []])} | arguments)


# The values of trec_eval and sentence-transformers, where no scores tie.

QUERIES, DOCUMENTS, K = 40, 300, 10
QUERY_NAMES, DOCUMENT_NAMES = [f"q{i}" for i in range(QUERIES)], [f"d{j}" for j in range(DOCUMENTS)]


def judged_by_all():
    """Queries and documents, their grades, and their scores by name."""
    rng = np.random.default_rng(0)
    data = tuple(torch.from_numpy(rng.normal(size=(n, 8))) for n in (QUERIES, DOCUMENTS))
    grades = {
        query: {f"d{j}": int(rng.integers(0, 4)) for j in rng.choice(DOCUMENTS, 12, replace=False)}
        for query in QUERY_NAMES
    }
    for of_query in grades.values():
        of_query[next(iter(of_query))] = 1  # no query without a relevant document
    scores = (data[0] @ data[1].T).tolist()
    run = {query: dict(zip(DOCUMENT_NAMES, row, strict=True)) for query, row in zip(QUERY_NAMES, scores, strict=True)}
    return data, grades, run


def compare(theirs, data, grades):
    relevance = Relevance.from_judgements(grades, QUERY_NAMES, DOCUMENT_NAMES)
    options = {"relevance": relevance, "similarity": "dot", "metrics": tuple(theirs)}
    assert evaluate_retrieval(data[0], gallery=data[1], **options).values == pytest.approx(theirs, abs=1e-12)


def test_trec_eval():
    pytrec_eval = integration("pytrec_eval")
    data, grades, run = judged_by_all()
    names = {
        "map": "mAP", "recip_rank": "mrr", "recall_10": "ir_recall@10", "P_10": "precision@10",
        "ndcg_cut_10": "ndcg@10_linear", "map_cut_10": "map@10_relevant",
    }  # fmt: skip
    found = pytrec_eval.RelevanceEvaluator(grades, set(names)).evaluate(run)
    theirs = {ours: float(np.mean([of_query[name] for of_query in found.values()])) for name, ours in names.items()}
    compare(theirs, data, grades)


def test_documents_that_are_judged_and_not_in_the_gallery_are_those_that_trec_eval_does_not_find():
    """One of the queries finds none of its relevant documents."""
    pytrec_eval = integration("pytrec_eval")
    data, grades, run = judged_by_all()
    there = [n for n in range(DOCUMENTS) if n % 3]
    grades["q0"] = {f"d{n}": n % 4 for n in range(0, 30, 3)}
    grades["q1"] = {f"d{n}": n % 4 - 2 for n in range(30)}  # of which some are below zero
    names = {
        "map": "mAP", "recip_rank": "mrr", "recall_10": "ir_recall@10", "P_10": "precision@10", "Rprec": "r_precision",
        "ndcg_cut_10": "ndcg@10_linear", "ndcg_cut_1000": "ndcg@1000_linear", "map_cut_10": "map@10_relevant",
    }  # fmt: skip
    cut = {query: {f"d{n}": row[f"d{n}"] for n in there} for query, row in run.items()}
    found = pytrec_eval.RelevanceEvaluator(grades, set(names)).evaluate(cut)
    relevance = Relevance.from_judgements(grades, QUERY_NAMES, [f"d{n}" for n in there], unknown="ignore")
    options = {"relevance": relevance, "similarity": "dot", "metrics": (*names.values(), "pair_f1")}
    report = evaluate_retrieval(data[0], gallery=data[1][there], **options)
    for name, ours in names.items():
        theirs = [found[query][name] for query in QUERY_NAMES]
        assert report.per_query[ours].tolist() == pytest.approx(theirs, abs=1e-12), name
    assert report.per_query["mAP"][0] == 0
    assert report.queries_without_match == 0
    absent = sum(grade > 0 and int(name[1:]) % 3 == 0 for row in grades.values() for name, grade in row.items())
    outside = sum(int(name[1:]) % 3 == 0 for row in grades.values() for name in row)
    assert f"{absent} not in the gallery" in repr(relevance)
    assert relevance.unknown == outside
    assert not all(missing_facts(note, (f"{outside} judgements", "query", "item")) for note in report.notes)

    def work(processes):
        mine, theirs = torch.arange(processes.rank, QUERIES, 2), torch.arange(processes.rank, len(there), 2)
        sets = data[0][mine], None, data[1][there][theirs]
        return evaluate_retrieval(*sets, share=Share(processes, mine, theirs), **options)

    for other in in_threads(2, work):
        assert_equal(report, other)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from(["expected", "optimistic", "pessimistic"]))
def test_what_is_not_in_the_gallery_has_no_rank(seed, k, ties):
    """Under each rule for ties: the values of an order, in which such an item stands at infinity."""
    rng = np.random.default_rng(seed)
    scores, grades = rng.integers(0, 3, 6).astype(float), rng.integers(0, 3, 6)
    missing = rng.integers(1, 4, rng.integers(1, 4)).tolist()
    grades[0] = rng.integers(0, 2) * 2
    groups = [grades[scores == value].tolist() for value in sorted(set(scores), reverse=True)]
    wanted = [unfound(order, missing, k) for order in orders(groups, ties)]
    judged = {"q": dict(enumerate(grades.tolist())) | {100 + n: grade for n, grade in enumerate(missing)}, "p": {0: 1}}
    relevance = Relevance.from_judgements(judged, ["q", "p"], [*range(6)], unknown="ignore")
    options = {"similarity": "dot", "ties": ties, "metrics": tuple(wanted[0])}
    report = evaluate_retrieval(np.ones((2, 1)), gallery=scores[:, None], relevance=relevance, **options)
    for key in wanted[0]:
        if ties != "expected" and key in TIES_ARE_NO_BOUND:
            continue
        assert float(report.per_query[key][0]) == pytest.approx(np.mean([of[key] for of in wanted]), abs=1e-12), key


TIES_ARE_NO_BOUND: tuple[str, ...] = ()


def unfound(order, missing, k):
    """Metrics of one order by their definitions; the rank of a missing item is infinite."""
    ranks = [rank for rank, grade in enumerate(order, start=1) if grade]
    infinite = ranks + [np.inf] * len(missing)
    every, relevant = sorted([*order, *missing], reverse=True), len(infinite)
    precision = [number / rank for number, rank in enumerate(infinite, start=1)]

    def summed(cut):
        return sum(value for value, rank in zip(precision, infinite, strict=True) if rank <= cut)

    def discounted(grades, gain):
        return sum(gain(grade) / np.log2(rank + 1) for rank, grade in enumerate(grades[:k], start=1))

    inside = sum(rank <= k for rank in infinite)
    found = {
        "mAP": summed(np.inf) / relevant,
        "map@r": summed(relevant) / relevant,
        "r_precision": sum(rank <= relevant for rank in infinite) / relevant,
        "mrr": 1 / infinite[0],
        f"mrr@{k}": 1 / infinite[0] if infinite[0] <= k else 0.0,
        "minp": relevant / infinite[-1],
        f"map@{k}_min": summed(k) / min(k, relevant),
        f"map@{k}_relevant": summed(k) / relevant,
        f"map@{k}_found": summed(k) / max(1, inside),
        f"recall@{k}": float(inside > 0),
        f"ir_recall@{k}": inside / relevant,
        f"precision@{k}": inside / k,
        f"precision@{k}_last": inside / k,
        "ap_trapezoid": (sum(precision) + sum(1.0 if rank == 1 else n / (rank - 1) for n, rank in enumerate(infinite)))
        / 2
        / relevant,
    }
    for name, gain in (("", lambda grade: 2**grade - 1), ("_linear", float)):
        found[f"ndcg@{k}{name}"] = discounted(order, gain) / discounted(every, gain)
    return found


def test_the_smallest_relevant_grade_is_that_of_trec_eval_but_for_ndcg():
    pytrec_eval = integration("pytrec_eval")
    data, grades, run = judged_by_all()
    names = {"map": "mAP", "recip_rank": "mrr", "recall_10": "ir_recall@10"}
    found = pytrec_eval.RelevanceEvaluator(grades, set(names), relevance_level=2).evaluate(run)
    relevance = Relevance.from_judgements(grades, QUERY_NAMES, DOCUMENT_NAMES, at_least=2)
    options = {"relevance": relevance, "similarity": "dot"}
    report = evaluate_retrieval(data[0], gallery=data[1], metrics=(*names.values(), "ndcg@10"), **options)
    for name, ours in names.items():
        matched = ~report.per_query[ours].isnan()
        theirs = [found[query][name] for query, has in zip(QUERY_NAMES, matched.tolist(), strict=True) if has]
        assert report.per_query[ours][matched].tolist() == pytest.approx(theirs, abs=1e-12), name
    ones = sum(grade == 1 for row in grades.values() for grade in row.values())
    facts = ("ndcg@10", f"{ones} judgements", "at_least=2", "trec_eval")
    assert not all(missing_facts(note, facts) for note in report.notes), report.notes
    assert not any(
        "at_least" in each
        for each in evaluate_retrieval(data[0], gallery=data[1], **options | {"metrics": ("mAP",)}).notes
    )


@pytest.mark.parametrize("form", ["{}\t{}\t{}", "{} {} {}", "{}\t0\t{}\t{}", "{} 0 {} {}"])
@pytest.mark.parametrize("heading", [True, False])
def test_a_file_of_judgements_has_three_or_four_columns_and_perhaps_a_heading(tmp_path, form, heading):
    lines = [form.format(*each) for each in (("q1", "d1", 2), ("q1", "d2", -1), ("q2", "d3", 1))]
    file = tmp_path / "judged.tsv"
    names = form.replace("0", "iteration").format("query-id", "corpus-id", "score")
    file.write_text("\n".join([names] * heading + lines) + "\n")
    relevance = Relevance.from_judgements(file, ["q1", "q2"], ["d1", "d2", "d3"])
    judged = judged_items(relevance)
    assert (judged.relevant.items.tolist(), judged.grades.tolist()) == ([0, 2], [2.0, 1.0])


@pytest.mark.parametrize("content", [b"", b"\n\n", b"word\n", b"query-id corpus-id score\n", bytes(range(14, 200))])
def test_a_file_without_a_judgement_is_refused(tmp_path, content):
    file = tmp_path / "judged.tsv"
    file.write_bytes(content)
    with refused(ValueError, "Relevance.from_judgements", file):
        Relevance.from_judgements(file, ["q1"], ["d1"])


@pytest.mark.parametrize("line", [1, 2])
@pytest.mark.parametrize("form", ["{}\t0\t{}\t{}", "{} 0 {} {}"])
def test_a_grade_that_is_no_number_is_refused_in_every_line_of_trec(tmp_path, form, line):
    lines = [form.format("q1", "d1", 1), form.format("q1", "d2", 1)]
    lines[line - 1] = form.format("q0", "d0", "x")
    file = tmp_path / "judged.tsv"
    file.write_text("\n".join(lines))
    with refused(ValueError, "Relevance.from_judgements", "grade", f"line {line}", file, "'x'"):
        Relevance.from_judgements(file, ["q0", "q1"], ["d0", "d1", "d2"])


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e-12, 0.25, 700.0, 1e300])
@pytest.mark.parametrize("gain", ["", "_linear"])
def test_grades_of_any_size_have_a_gain(scale, gain):
    """Grades of 1 and 2 in units of the scale: small ones are as linear gains are, for 2^x - 1 is nearly x log 2."""
    relevance = Relevance.from_lists([[0, 2]], gallery=4, grades=[[2 * scale, scale]])
    options = {"gallery": torch.arange(4.0)[:, None] + 1, "relevance": relevance, "similarity": "dot"}
    found = evaluate_retrieval(torch.ones(1, 1), metrics=(f"ndcg@4{gain}",), **options)[f"ndcg@4{gain}"]
    ratio = 2.0 if gain or scale < 1e-10 else 2**scale + 1 if scale < 1e3 else np.inf
    place = 1 / np.log2(
        [5, 3, 2, 3]
    )  # the larger grade is found at rank 4, the smaller at 2; the best order has 1 and 2
    expected = (place[0] + place[1] / ratio) / (place[2] + place[3] / ratio)
    assert found == pytest.approx(expected, rel=1e-9)


def test_labels_of_sets_are_what_they_are():
    """Integers beyond 2**53, and words that differ in a zero character."""
    for labels in ([2**60, 2**60 + 1], ["a", "a\0"], [2**70, -1]):
        one, other = labels
        found = SETS([[one], [other], [one, other]])
        assert judged_items(found).relevant.sizes.tolist() == [1, 1, 2], labels


def test_sentence_transformers():
    evaluation = integration("sentence_transformers.evaluation")
    data, grades, run = judged_by_all()
    relevant = {query: {item for item, grade in of_query.items() if grade} for query, of_query in grades.items()}
    evaluator = evaluation.InformationRetrievalEvaluator(
        dict.fromkeys(QUERY_NAMES, ""), dict.fromkeys(DOCUMENT_NAMES, ""), relevant,
        mrr_at_k=[K], ndcg_at_k=[K], accuracy_at_k=[K], precision_recall_at_k=[K], map_at_k=[K],
        score_functions={"dot": lambda one, other: one @ other.T},
    )  # fmt: skip
    found = evaluator.compute_metrics([
        [{"corpus_id": document, "score": score} for document, score in row.items()] for row in run.values()
    ])  # fmt: skip
    names = {"mrr@k": "mrr@10", "accuracy@k": "recall@10", "precision@k": "precision@10", "recall@k": "ir_recall@10",
             "map@k": "map@10_min"}  # fmt: skip
    compare({ours: float(found[name][K]) for name, ours in names.items()}, data, grades)
    binary = {query: dict.fromkeys(items, 1) for query, items in relevant.items()}
    compare({"ndcg@10_linear": float(found["ndcg@k"][K])}, data, binary)


@pytest.mark.parametrize("missing", [None, 0.5, b"sky"])
def test_what_is_suggested_for_labels_that_are_missing_is_not_refused(missing):
    with refused(ValueError, LABEL_SETS, missing) as caught:
        SETS([missing, ["sky"]])
    assert f"[{missing!r}]" not in str(caught.value)
