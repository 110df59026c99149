"""Names of metrics that are not those here: which one a message proposes, and patterns of a report."""

import math
import re
from pathlib import Path

import pytest
import torch

from fewshot_callbacks import evaluate_identification, evaluate_retrieval, evaluate_trials, knn_accuracy
from fewshot_callbacks.functional.retrieval import requested_metric
from tests.messages import refused

PAGES = sorted((Path(__file__).parents[3] / "docs/coming_from").glob("*.md"))

MEANT = {
    # other letters
    "map": "mAP", "Map": "mAP", "MAP": "mAP", "mAP@R": "map@r", "MAP@R": "map@r", "MRR": "mrr", "MRR@10": "mrr@10",
    "mINP": "minp", "NDCG@10": "ndcg@10", "Recall@5": "recall@5", "EER": "eer", "F1": "pair_f1", "AUC_PR": "auc_pr",
    "MAP@10_FOUND": "map@10_found", "FNMR@FMR0.001": "fnmr@fmr0.001", "Precision@3_last": "precision@3_last",
    # other signs
    "R-precision": "r_precision", "r precision": "r_precision", "recall_at_5": "recall@5", "recall-at-5": "recall@5",
    "mrr_at_10": "mrr@10", "ndcg_at_10_linear": "ndcg@10_linear", "grouped_recall_at_5": "grouped_recall@5",
    "AP_trapezoid": "ap_trapezoid", "auc-pr": "auc_pr", "prototype-accuracy": "prototype_accuracy",
    # pytorch-metric-learning
    "precision_at_1": "recall@1", "mean_average_precision": "mAP", "mean_average_precision_at_r": "map@r",
    "mean_reciprocal_rank": "mrr",
    # torchmetrics
    "RetrievalMAP": "mAP", "RetrievalMRR": "mrr", "RetrievalHitRate": "recall@1", "RetrievalHitRate@5": "recall@5",
    "RetrievalRecall@5": "ir_recall@5", "RetrievalPrecision@5": "precision@5", "RetrievalRPrecision": "r_precision",
    "RetrievalNormalizedDCG@5": "ndcg@5", "RetrievalMAP(top_k=5)": "map@5_found",
    # open-metric-learning, re-identification
    "cmc_top_5": "recall@5", "cmc@5": "recall@5", "rank1": "recall@1", "rank-1": "recall@1", "Rank@10": "recall@10",
    "hit_rate@5": "recall@5", "hits@10": "recall@10", "top1": "recall@1", "top-5 accuracy": "recall@5", "R@1": "recall@1",
    "precision_top_5": "precision@5", "map_top_5": "map@5_found", "acc@1": "recall@1",
    # trec_eval
    "recip_rank": "mrr", "Rprec": "r_precision", "P_10": "precision@10", "recall_10": "ir_recall@10",
    "success_1": "recall@1", "ndcg_cut_10": "ndcg@10_linear", "map_cut_10": "map@10_relevant",
    # sentence-transformers
    "accuracy@10": "recall@10", "map@100": "map@100_min", "cosine_map@100": "map@100_min",
    "cosine_f1": "pair_f1", "cosine_precision": "pair_precision", "dot_recall": "pair_recall",
    "euclidean_f1_threshold": "pair_threshold",
    # scikit-learn
    "precision": "pair_precision", "recall": "pair_recall", "f1": "pair_f1", "f1score": "pair_f1",
    # papers
    "average_precision": "mAP", "P@10": "precision@10", "f1_score": "pair_f1", "pr_auc": "auc_pr", "AUPRC": "auc_pr",
    "RetrievalAUROC": "auroc", "AUROC": "auroc", "roc_auc": "pair_auroc", "roc_auc_score": "pair_auroc",
    # misspelt
    "recal@5": "recall@5", "ndgc@7": "ndcg@7",
}  # fmt: skip


@pytest.mark.parametrize(("key", "meant"), MEANT.items())
def test_a_name_that_others_use_leads_to_the_metric(key, meant):
    of_pairs = meant.startswith("pair_") or meant in ("auc_pr", "fnmr@fmr0.001")
    for start in ("", "macro_") if meant[0] not in "ego" and not of_pairs else ("",):
        with refused(ValueError, f"'{start + key}'", f"'{start + meant}'"):
            requested_metric(start + key)


@pytest.mark.parametrize(
    ("key", "facts"),
    [
        ("recall", ("'pair_recall'", "recall@1", "grouped_recall@1", "ir_recall@10", "recall@precision0.95")),
        ("macro_recall", ("'pair_recall'", "recall@1", "grouped_recall@1", "ir_recall@10", "recall@precision0.95")),
        ("precision", ("'pair_precision'", "threshold", "precision@5")),
        ("f1", ("'pair_f1'", "threshold", "pair_precision", "pair_recall", "recall@1")),
        ("f1score", ("'pair_f1'", "threshold", "pair_precision", "pair_recall", "recall@1")),
        ("threshold", ("'pair_threshold'", "score", "pair_precision", "pair_recall", "pair_f1")),
    ],
)
def test_a_name_that_several_metrics_have_elsewhere_is_explained(key, facts):
    with refused(ValueError, f"'{key}'", *facts):
        requested_metric(key)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_of_coming_from_are_known(page):
    """The first name of a row that names a metric leads to it, or is its name."""
    rows = re.findall(r"^\| `([\w()@=]+)`[^|]*\| `([\w@.]+)`", page.read_text(encoding="utf-8"), re.MULTILINE)
    for name, here in rows:
        theirs, ours = (re.sub(r"(?<![a-z])k\b", "5", each) for each in (name, here))
        try:
            requested_metric(ours)
        except ValueError:
            continue  # an argument
        if theirs == ours or theirs in ("mean_average_precision", "binary_recall_at_fixed_precision"):
            continue  # with an argument that a name does not hold
        if (theirs, ours) == ("recall@5", "ir_recall@5"):
            continue  # one name for two metrics, as the page says
        with refused(ValueError, f"'{theirs}'", f"'{ours}'"):
            requested_metric(theirs)


@pytest.mark.parametrize(
    ("key", "meant"),
    [("EER", "eer"), ("minDCF", "min_dcf@0.95"), ("min_dcf_0.01", "min_dcf@0.01"), ("TAR@FAR=0.01", "tar@far0.01"),
     ("tar@fmr0.1", "tar@far0.1"), ("Cllr", "cllr"), ("TMR@FMR1e-3", "tar@far1e-3"),
     ("auroc", "pair_auroc"), ("roc_auc_score", "pair_auroc")],
)  # fmt: skip
def test_names_of_verification(key, meant):
    with refused(ValueError, f"'{key}'", f"'{meant}'"):
        evaluate_trials([0.9, 0.1], [1, 0], metrics=(key,))


METRICS = (
    *(
        "recall@1",
        "macro_recall@1",
        "recall@3",
        "map@3_min",
        "map@3_found",
        "recall@precision0.5",
        "recall@precision0.75",
    ),
    *("mAP", "fnmr@fmr0.1"),
)


def test_a_pattern_has_one_number_left_open():
    report = evaluate_retrieval(torch.randn(60, 4), torch.arange(60) % 20, metrics=METRICS)
    assert report.at("recall@{k}") == {1: report["recall@1"], 3: report["recall@3"]}
    assert report.at("macro_recall@{k}") == {1: report["macro_recall@1"]}
    assert report.at("map@{k}_min") == {3: report["map@3_min"]}
    assert report.at("map@{k}_found") == {3: report["map@3_found"]}
    rates = report.at("recall@precision{p}")
    assert rates == {0.5: report["recall@precision0.5"], 0.75: report["recall@precision0.75"]}
    assert report.at("ir_recall@{k}") == {}
    for pattern in ("recall@1", "recal@{k}", "mAP", "map@{k}_{divisor}", "recall@{p}", "{k}"):
        with refused(ValueError, f"'{pattern}'", "recall@{k}", "macro_recall@{k}", "map@{k}_min", "fnmr@fmr{p}"):
            report.at(pattern)


def test_patterns_of_other_reports():
    generator = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(40, 4, generator=generator), torch.arange(40) % 8
    votes = knn_accuracy(rows, labels, k=(1, 3))
    assert votes.at("knn@{k}_top5") == {k: votes[f"knn@{k}_top5"] for k in (1, 3)}
    keys = ("tpir@fpir0.1_rank1", "tpir@fpir0.1_rank5", "tpir@fpir0.5_rank5", "recall@1")
    found = evaluate_identification(rows, labels, rows[:20], labels[:20] % 6, metrics=keys)
    assert found.at("tpir@fpir0.1_rank{k}") == {1: found[keys[0]], 5: found[keys[1]]}
    assert found.at("tpir@fpir{p}_rank5") == {0.1: found[keys[1]], 0.5: found[keys[2]]}
    trials = evaluate_trials([0.9, 0.8, 0.1], [1, 0, 0])
    assert trials.at("tar@far{p}") == {0.01: trials["tar@far0.01"], 0.001: trials["tar@far0.001"]}
    with refused(ValueError, "'tar@{k}'", "min_dcf@{p}", "tar@far{p}"):
        trials.at("tar@{k}")
    assert math.isfinite(votes.at("knn@{k}")[1])
