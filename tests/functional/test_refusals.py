"""What cannot be computed from is refused in words that name the mistake and its fix."""

import math

import numpy as np
import pytest
import torch

from fewshot_callbacks import (
    evaluate_identification,
    evaluate_trials,
    knn_accuracy,
    linear_probe,
    near_duplicates,
    nearest,
    suspects,
    trial_scores,
)
from fewshot_callbacks.functional import (
    class_subset,
    discriminant_ratio,
    embedding_health,
    evaluate_retrieval,
    variance_ratio,
    variance_ratio_of_set,
)
from fewshot_callbacks.functional.episodes import sample_episodes, split_episode, split_episodes, summarize_accuracies
from fewshot_callbacks.losses import BinaryCodes, SoftAveragePrecisionLoss
from tests.messages import refused

LABELS, LONG = torch.arange(60) % 6, torch.tensor([0] * 20 + [12] * 12 + [13] * 16)
EYE, NAN, NOTHING = torch.eye(3), torch.full((3, 3), math.nan), torch.zeros(0, dtype=torch.int64)
EPISODES = sample_episodes(LABELS, ways=2, shots=1, queries=3, episodes=2)

REFUSED = [
    (knn_accuracy, {"queries": EYE, "query_labels": [0, 1, 2], "gallery": EYE, "gallery_labels": [0, 1, 2], "k": 1}, [
        ({"query_labels": [7, 8, 9]}, (3, "queries", "candidate", "label", "gallery")),
        ({"query_labels": ["a", "b", "c"]},
         ("query_labels", "strings", "gallery_labels", "integers", "list(map(str, map(int, gallery_labels)))")),
        ({"gallery": torch.eye(4), "gallery_labels": [0] * 4}, ("queries", 3, "gallery", 4)),
        ({"gallery_labels": None}, ("gallery", "gallery_labels")),
        ({"k": 0}, ("k=0", 1, "(10, 20)")),
        ({"gallery": None, "gallery_labels": None, "gallery_ids": [0, 1, 2]},
         ("knn_accuracy", "gallery_ids", "gallery", "query_ids=")),
        ({"gallery_ids": [0, 1, 2]}, ("knn_accuracy", "gallery_ids", "query_ids", "both")),
        ({"temperature": 0.0}, ("temperature=0.0", 0.07, None)),
    ]),
    (linear_probe, {"queries": EYE, "query_labels": [0, 1, 2], "gallery": EYE, "gallery_labels": [0, 1, 2]}, [
        ({"query_labels": [7, 8, 9]}, ("linear_probe", 3, "queries", "label", "gallery", "query_labels")),
        ({"gallery_labels": [5, 5, 5]}, (3, "gallery", "label 5", "classifier")),
        ({"query_labels": list("abc"), "gallery_labels": list("aaa")}, (3, "gallery", "label 'a'", "classifier")),
        ({"query_labels": ["a", "b", "c"]},
         ("query_labels", "strings", "gallery_labels", "integers", "list(map(str, map(int, gallery_labels)))")),
        ({"query_labels": [0.0, 1.0, 2.0]},
         ("query_labels", "floats", "gallery_labels", "classes", "regression", "query_labels.long()")),
        ({"query_labels": [0, 1]}, ("linear_probe", "3 queries", "2 query_labels")),
        ({"query_labels": [0.5, 1.5], "gallery_labels": [0.5, 1.5, 2.5]},
         ("linear_probe", "3 queries", "2 query_labels")),
        ({"gallery": None, "gallery_labels": None}, ("linear_probe", "gallery", "gallery_labels=", "is_gallery=")),
        ({"gallery_labels": None}, ("linear_probe", "gallery without gallery_labels", "both")),
        ({"query_labels": [0.5, 1.5, math.nan]}, (1, 3, "query_labels", "NaN", "1e+100", "index 2")),
        ({"query_labels": ["a", "b", None]}, (1, 3, "query_labels", None, "index 2")),
        ({"query_labels": torch.ones(3, 2), "gallery_labels": torch.ones(3, 4)},
         ("targets", 2, "query_labels", 4, "gallery_labels")),
        ({"query_labels": torch.ones(3, 1, 1)}, ("query_labels", "(3, 1, 1)", "(items,)", "(items, targets)")),
        ({"query_labels": torch.eye(3).long()}, ("query_labels", "(3, 3)", "query_labels.argmax(dim=1)", "one-hot")),
        ({"query_labels": [0.5] * 3, "gallery": torch.ones(1, 3), "gallery_labels": [0.5]},
         ("gallery", "single", "regression")),
        ({"gallery": torch.ones(1, 3), "gallery_labels": [0]}, (1, "gallery", "label 0", "classifier")),
        ({"queries": NAN}, ("linear_probe", 3, "queries", "NaN", "index 0")),
        ({"gallery": NAN}, ("linear_probe", 3, "gallery", "NaN", "index 0")),
        ({"gallery": torch.eye(4), "gallery_labels": [0, 1, 0, 1]}, ("queries", 3, "gallery", 4)),
        ({"queries": torch.ones(3)}, ("linear_probe", "queries", "(items, dim)", "(3,)", "queries[None]")),
        ({"gallery": EYE.long()}, ("linear_probe", "gallery", "torch.int64", "gallery.float()")),
        ({"gallery_groups": ["a"] * 3}, ("gallery", "group", "gallery_groups")),
        ({"gallery_groups": [1, 2]}, ("linear_probe", "3 gallery", "2 gallery_groups")),
        ({"gallery_groups": [1, 2, 3], "query_groups": list("abc")},
         ("query_groups", "strings", "gallery_groups", "list(map(str, map(int, gallery_groups)))")),
        ({"strengths": 0}, ("linear_probe", "strengths=0", "1e-09", "1e+09", "(0.001, 0.1, 10)")),
        ({"strengths": (1, 1e10)}, ("linear_probe", "strengths", "1e+10", "1e-09", "1e+09")),
        ({"strengths": ()}, ("linear_probe", "strengths", "empty", "1e-09", "1e+09")),
        ({"confidence": 95}, ("confidence=95", 0, 1, 0.95)),
    ]),
    (near_duplicates, {"queries": torch.eye(4)}, [
        ({"min_score": 1.5}, ("near_duplicates", "cosine", "min_score=1.5", "[-1, 1]")),
        ({"min_score": 0.1, "similarity": "euclidean"}, ("euclidean", "min_score=0.1", "distance", -0.1)),
        ({"min_score": 1, "similarity": "hamming", "queries": torch.ones(3, 4)},
         ("hamming", "min_score=1", "bits", -2)),
        ({"min_score": math.inf, "similarity": "dot"}, ("dot", "min_score=inf", "finite")),
        ({"min_score": "high"}, ("min_score='high'", "[-1, 1]")),
        ({"most": -1}, ("near_duplicates", "most=-1", 0)),
        ({"gallery": torch.eye(3)}, ("queries", 4, "gallery", 3)),
        ({"gallery": torch.full((2, 4), math.inf)}, ("near_duplicates", 2, "gallery", "NaN", "Inf", "index 0")),
        ({"queries": torch.ones(1, 4)}, ("near_duplicates", "queries", "single", "pair", "gallery")),
    ]),
    (nearest, {"queries": torch.eye(4)}, [
        ({"k": 0}, ("nearest", "k=0", 1, 10)),
        ({"query_indices": [0, 9]}, ("nearest", "query_indices", 9, "queries", 4, "0 to 3")),
        ({"query_indices": [-1]}, ("query_indices", -1, "0 to 3")),
        ({"query_indices": [0.5]}, ("query_indices", "indices", "(1,)", "torch.float32", "[0, 5]")),
        ({"query_indices": []}, ("query_indices", "empty", 4, "queries")),
        ({"gallery": EYE}, ("nearest", "queries", 4, "gallery", 3)),
        ({"queries": torch.tensor([[0.0], [math.nan]])}, (1, 2, "queries", "NaN", "index 1")),
        ({"queries": torch.ones(1, 4)}, ("the only query", "candidate", "gallery")),
        ({"query_groups": [1, 1, 1, 1]}, (4, "queries", "candidate", "groups", "gallery")),
        ({"query_labels": [1, 2, 3]}, ("nearest", "4 queries", "3 query_labels")),
        ({"gallery": torch.eye(4), "query_labels": [1, 2, 3, 4]}, ("query_labels", "gallery", "gallery_labels")),
        ({"similarity": "cos"}, ("similarity='cos'", "cosine")),
        ({"similarity": "hamming", "queries": 0.3 * torch.eye(4)}, ("binary", 4, 16, "(0.3, 0.3, 0.3, ...)", "queries > 0")),
        ({"memory_mb": 0}, ("memory_mb=0", 512)),
    ]),
    (suspects, {"embeddings": torch.eye(4), "labels": [0, 0, 1, 1]}, [
        ({"k": 0}, ("suspects", "k=0", 1, 10)),
        ({"labels": [1, 1, 1, 1]}, ("suspects", 4, "labels", "same", "classes")),
        ({"min_probability": 1.5}, ("suspects", "min_probability=1.5", "0 to 1", 0.5)),
        ({"embeddings": torch.ones(4)}, ("suspects", "embeddings", "(items, dim)", "(4,)", "embeddings[None]")),
    ]),
    (evaluate_identification, {"queries": EYE, "query_labels": [0, 1, 2], "gallery": EYE, "gallery_labels": [0, 1, 2]}, [
        ({"query_labels": [7, 8, 9]}, ("evaluate_identification", 3, "queries", "label", "gallery")),
        ({"query_labels": ["a", "b", "c"]},
         ("query_labels", "strings", "gallery_labels", "integers", "list(map(str, map(int, gallery_labels)))")),
        ({"query_labels": [0, 1]}, ("3 queries", "2 query_labels")),
        ({"gallery": torch.eye(4)}, ("queries", 3, "gallery", 4)),
        ({"metrics": ("tpir@far0.1",)}, ("'tpir@far0.1'", "'tpir@fpir0.1'")),
        ({"queries": NAN}, (3, "queries", "NaN", "index 0")),
    ]),
    (evaluate_trials, {"scores": [0.9, 0.8, 0.2, 0.1], "same": [1, 0, 1, 0]}, [
        ({"scores": [0.1, math.nan, math.inf, 2e300]}, (3, 4, "scores", "NaN", "1e+300", "index 1")),
        ({"scores": [[0.1], [0.2, 0.3]]}, ("scores", "list", "tensor")),
        ({"scores": np.full(4, 1j)}, ("scores", "complex", "real")),
        ({"same": [1, 0, 2, 0]}, ("same", 2, "index 2", True, False)),
        ({"same": [True] * 4}, (4, "are target", "non-target", "same")),
        ({"same": [False] * 4}, (4, "are non-target", "same")),
        ({"same": [True, False]}, ("4 scores", "2 same")),
        ({"scores": [], "same": []}, ("scores", "(trials,)", "(0,)")),
        ({"first": list("abcd")}, ("first", "second", "both")),
        ({"first": list("abc"), "second": list("abcd")}, ("4 scores", "3 first")),
        ({"first": list("aabb"), "second": list("abbb")}, (1, 4, "same", "identities", "index 3", False)),
        ({"folds": [0, 0, 1, 2]}, ("fold 1", "1 trials", "target")),
        ({"folds": list("aaaa")}, ("folds", "single", "'a'", "0 to 9")),
        ({"metrics": ("accuracy",)}, ("accuracy", "folds=")),
        ({"metrics": ("tar@fmr0.1",)}, ("'tar@fmr0.1'", "'tar@far0.1'")),
        ({"metrics": ("min_dcf@1",)}, ("min_dcf@1", "non-target", 1)),
        ({"metrics": ()}, ("metrics", "empty", "metrics=('eer',)")),
        ({"miss_cost": 0}, ("miss_cost=0", "positive", 1.0)),
        ({"confidence": 95}, ("confidence=95", 0, 1, 0.95)),
    ]),
    (embedding_health, {"embeddings": torch.ones(5, 2)}, [
        ({"embeddings": NAN}, ("embedding_health", 3, "embeddings", "NaN", "Inf", "index 0")),
        ({"embeddings": torch.ones(0, 2)}, ("embedding_health", "embeddings", "empty", "(0, 2)")),
        ({"labels": [0, 1]}, ("embedding_health", "5 embeddings", "2 labels")),
        ({"k": 1}, ("embedding_health", "k=1", 2, 10, None)),
    ]),
    (discriminant_ratio, {"embeddings": torch.ones(6, 2), "labels": torch.arange(6)}, [
        ({"embeddings": torch.ones(6, 2, 2)},
         ("discriminant_ratio", "(items, dim)", "torch.float32", "(6, 2, 2)", "embeddings.flatten(1)")),
        ({"embeddings": torch.ones(6, 2).long()}, ("torch.int64", "embeddings.float()")),
        ({"labels": torch.arange(5)}, ("6 embeddings", "5 labels")),
        ({"labels": torch.ones(6)}, ("discriminant_ratio", "integer", "labels", "torch.float32", "labels.long()")),
    ]),
    (variance_ratio, {}, [
        ({"embeddings": torch.ones(6), "labels": torch.arange(6)},
         ("variance_ratio", "embeddings", "(items, dim)", "(6,)", "embeddings[None]")),
    ]),
    (variance_ratio_of_set, {"embeddings": torch.ones(6, 2)}, [
        ({"embeddings": torch.ones(6), "labels": torch.arange(6)},
         ("variance_ratio_of_set", "embeddings", "(items, dim)", "(6,)", "embeddings[None]")),
        ({"labels": torch.arange(6), "confidence": 95}, ("confidence=95", 0, 1, 0.95)),
        ({}, ("variance_ratio_of_set(embeddings)", "labels", "integer", "string")),
    ]),
    (evaluate_retrieval, {"queries": torch.eye(6).sign(), "query_labels": torch.arange(6), "similarity": "hamming"}, [
        ({"gallery": torch.ones(3, 5), "gallery_labels": [0, 1, 2]}, ("codes", "6 bits", "gallery", "5 bits")),
        ({"gallery": torch.ones(3, 6)}, ("gallery", "gallery_labels", "both")),
        ({"metrics": ("prototype_accuracy",)}, ("binary", "prototype_accuracy", "similarity='hamming'")),
        ({"query_labels": [0, 1]}, (6, "2 query_labels")),
        ({"queries": torch.tensor([[1, -1], [0.5, 2]])}, ("binary", 2, 4, "queries", "(0.5, 2)", "queries > 0")),
        ({"queries": NAN}, (9, "queries", "(nan, nan, nan, ...)")),
        ({"queries": torch.tensor([[1, -1, 0]])}, ("queries", "-1 and 0", "queries > 0")),
        ({"queries": torch.ones(3)}, ("queries", "(3,)", "(items, bits)")),
        ({"queries": torch.ones(3, 0)}, ("queries", "(3, 0)", "(items, bits)")),
    ]),
    (SoftAveragePrecisionLoss, {}, [
        ({"bins": 1}, ("bins=1", "whole", 2)),
        ({"similarity": "dot"}, ("similarity='dot'", "cosine", "euclidean", "hamming")),
        ({"on_empty": "nan"}, ("on_empty='nan'", "raise", "zero")),
        ({"low": 1.0}, ("low=1.0", "high=1.0", "low < high")),
        ({"similarity": "hamming", "bins": 9}, ("similarity='hamming'", "bins", "low", "high")),
    ]),
    (SoftAveragePrecisionLoss(), {"queries": torch.randn(4, 3), "query_labels": [0, 0, 1, 1]}, [
        ({"queries": NAN, "query_labels": [0, 0, 1]}, (3, "queries", "NaN", "Inf", "index 0")),
        ({"query_labels": [0, 0, 1]}, ("4 queries", "3 query_labels")),
        ({"gallery": EYE}, ("gallery", "gallery_labels")),
        ({"gallery": torch.randn(4, 2), "gallery_labels": [0, 0, 1, 1]}, ("queries", 3, "gallery", 2)),
        ({"query_labels": [0, 1, 2, 3]}, (4, "batch", "class", "ClassBalancedBatchSampler", "on_empty='zero'")),
    ]),
    (BinaryCodes, {}, [({"temperature": 0}, ("temperature=0", 0))]),
    (trial_scores, {"embeddings": EYE}, [
        ({"first": [0], "second": [3]}, ("trial_scores", "second", 3, "embeddings", "0 to 2")),
        ({"first": [], "second": []}, ("first", "empty", "3 embeddings")),
        ({"first": [0], "second": [1, 2]}, ("first", 1, "second", 2)),
    ]),
    (sample_episodes, {"labels": LONG, "ways": 2}, [
        ({}, ("2-way", "1-shot", "15 queries", 16, "class 12", "queries <= 11")),
        ({"queries": 18, "class_names": {12: "heron"}},
         ("18 queries", 19, "class 'heron'", 12, "2 classes", "queries <= 11")),
        ({"shots": 12, "queries": 1}, ("12-shot", 13, "class 12", "shots 1", "queries <= 11")),
        ({"labels": torch.arange(2), "queries": 1}, ("class 0", 1, "2 classes")),
        ({"labels": LABELS, "class_names": list("abcdef")}, ("class 'a'", 10, "6 classes", "queries <= 9")),
        ({"class_names": ["a"]}, ("15 queries", "class 12", 12)),
        ({"ways": 4}, ("4-way", "4 classes", 3, "ways <= 3")),
        ({"labels": NOTHING}, ("2-way", "2 classes", 0, "labels")),
        ({"labels": LABELS.float()}, ("sample_episodes", "integer", "labels", "torch.float32", "labels.long()")),
        ({"shots": 0}, ("shots", 0, "shots >= 1")),
        ({"queries": 1.5}, ("queries", 1.5, "queries >= 1")),
    ]),
    (split_episode, {"embeddings": torch.randn(4, 2), "labels": [0, 0, 1, 1], "shots": 1}, [
        ({"labels": [0, 0, 0, 1]}, ("class 1", "class 0", 3, "EpisodicBatchSampler")),
        ({"shots": 2}, ("2-shot", "query", "2 classes", "2 rows", "shots <= 1")),
        ({"labels": [0, 1, 2, 3]}, ("1-shot", "query", "4 classes", "1 row", "images")),
        ({"labels": [0, 0]}, ("4 embeddings", "2 labels")),
        ({"embeddings": torch.randn(0, 2), "labels": NOTHING}, ("episode", "empty", 0, "EpisodicBatchSampler")),
    ]),
    (split_episodes, {"embeddings": torch.zeros(8, 2), "labels": [0, 0, 1, 1, 2, 2, 3, 3], "shots": 1, "episodes": 2}, [
        ({"episodes": 3}, ("8 embeddings", "(8,)", "3 episodes")),
        ({"labels": [0, 0, 1, 1, 5, 5, 5, 5]}, ("Episode 1", 2, "1 class", "EpisodicBatchSampler")),
        ({"labels": [0, 1, 0, 1, 1, 1, 1, 0]}, ("Episode 1", 2, "class 0", 1, "class 1", 3)),
        ({"labels": [0, 1, 2, 3, 0, 1, 2, 3]}, ("1-shot", "query", "4 classes", "1 row")),
    ]),
    (summarize_accuracies, {"accuracies": torch.tensor([0.5, 0.6]), "episode_list": EPISODES}, [
        ({"accuracies": torch.empty(0)}, (0, "episodes")),
        ({"accuracies": torch.tensor([0.5])}, ("1 accuracies", "2 episodes", "hash", "episode_list.first(n)")),
        ({"accuracies": torch.tensor([50.0, 60.0])}, ("[0, 1]", "50 to 60", "fractions")),
        ({"accuracies": torch.tensor([0.5, math.nan])}, ("[0, 1]", "nan", "NaN")),
    ]),
    (class_subset, {"labels": torch.arange(3)}, [
        ({"classes": 0}, ("class_subset", "classes=0", 1, None)),
        ({"items_per_class": 0}, ("class_subset", "items_per_class=0", 1, None)),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "arguments", "facts"),
    [(function, good | wrong, facts) for function, good, rows in REFUSED for wrong, facts in rows],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_what_is_given_wrongly_is_refused_with_the_fix(function, arguments, facts):
    with refused(ValueError, *facts):
        function(**arguments)
