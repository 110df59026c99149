"""The values of trec_eval, ranx and sentence-transformers; where scores tie, theirs lie between the rules for ties."""

import numpy as np
import pytest
import torch

from fewshot_callbacks.functional import Relevance, evaluate_retrieval

QUERIES, DOCUMENTS, K = 40, 300, 10


def judged(tied):
    rng = np.random.default_rng(0)
    queries, documents = rng.normal(size=(QUERIES, 8)), rng.normal(size=(DOCUMENTS, 8))
    if tied:
        queries, documents = np.rint(queries), np.rint(documents)
    grades = {
        f"q{i}": {f"d{j}": int(rng.integers(0, 4)) for j in rng.choice(DOCUMENTS, 12, replace=False)}
        for i in range(QUERIES)
    }
    for of_query in grades.values():
        of_query[next(iter(of_query))] = 1  # no query without a relevant document
    return torch.from_numpy(queries), torch.from_numpy(documents), grades


def ours(queries, documents, grades, metrics, ties="expected"):
    names = [f"q{i}" for i in range(QUERIES)], [f"d{j}" for j in range(DOCUMENTS)]
    relevance = Relevance.from_judgements(grades, *names)
    report = evaluate_retrieval(
        queries, gallery=documents, relevance=relevance, similarity="dot", metrics=metrics, ties=ties
    )
    return report.metrics()


def compare(theirs, data, *, tied, tolerance=1e-12):
    if not tied:
        assert ours(*data, tuple(theirs)) == pytest.approx(theirs, abs=tolerance)
        return
    lowest, highest = (ours(*data, tuple(theirs), ties) for ties in ("pessimistic", "optimistic"))
    for name, value in theirs.items():
        assert lowest[name] - tolerance <= value <= highest[name] + tolerance, name


@pytest.mark.parametrize("tied", [False, True])
def test_trec_eval(tied):
    pytrec_eval = pytest.importorskip("pytrec_eval")
    data = queries, documents, grades = judged(tied)
    scores = (queries @ documents.T).tolist()
    run = {f"q{i}": {f"d{j}": score for j, score in enumerate(row)} for i, row in enumerate(scores)}
    names = {
        "map": "mAP", "recip_rank": "mrr", "recall_10": "ir_recall@10", "P_10": "precision@10",
        "ndcg_cut_10": "ndcg@10_linear", "map_cut_10": "map@10_relevant",
    }  # fmt: skip
    found = pytrec_eval.RelevanceEvaluator(grades, set(names)).evaluate(run)
    theirs = {ours: float(np.mean([of_query[name] for of_query in found.values()])) for name, ours in names.items()}
    compare(theirs, data, tied=tied)


@pytest.mark.filterwarnings("ignore")  # of its compiled loops
def test_ranx():
    ranx = pytest.importorskip("ranx")
    data = queries, documents, grades = judged(tied=False)
    scores = (queries @ documents.T).tolist()
    run = {f"q{i}": {f"d{j}": score for j, score in enumerate(row)} for i, row in enumerate(scores)}
    names = {"map": "mAP", "mrr@10": "mrr@10", "recall@10": "ir_recall@10", "precision@10": "precision@10",
             "ndcg@10": "ndcg@10_linear", "ndcg_burges@10": "ndcg@10", "hit_rate@10": "recall@10"}  # fmt: skip
    relevant = {query: {item: grade for item, grade in of_query.items() if grade} for query, of_query in grades.items()}
    found = ranx.evaluate(ranx.Qrels(relevant), ranx.Run(run), list(names))
    compare({ours: float(found[name]) for name, ours in names.items()}, data, tied=False)


@pytest.mark.parametrize("tied", [False, True])
def test_sentence_transformers(tied):
    evaluation = pytest.importorskip("sentence_transformers.evaluation")
    data = queries, documents, grades = judged(tied)
    relevant = {query: {item for item, grade in of_query.items() if grade} for query, of_query in grades.items()}
    evaluator = evaluation.InformationRetrievalEvaluator(
        {f"q{i}": "" for i in range(QUERIES)}, {f"d{j}": "" for j in range(DOCUMENTS)}, relevant,
        mrr_at_k=[K], ndcg_at_k=[K], accuracy_at_k=[K], precision_recall_at_k=[K], map_at_k=[K],
        score_functions={"dot": lambda one, other: one @ other.T},
    )  # fmt: skip
    found = evaluator.compute_metrics([
        [{"corpus_id": f"d{j}", "score": score} for j, score in enumerate(row)]
        for row in (queries @ documents.T).tolist()
    ])  # fmt: skip
    theirs = {
        "mrr@10": found["mrr@k"][K], "recall@10": found["accuracy@k"][K], "precision@10": found["precision@k"][K],
        "ir_recall@10": found["recall@k"][K], "map@10_min": found["map@k"][K],
    }  # fmt: skip
    compare({name: float(value) for name, value in theirs.items()}, data, tied=tied)
    binary = {query: dict.fromkeys(items, 1) for query, items in relevant.items()}
    compare({"ndcg@10_linear": float(found["ndcg@k"][K])}, (queries, documents, binary), tied=tied)
