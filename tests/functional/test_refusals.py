"""What cannot be computed from is refused in words that name the mistake and its fix."""

import math
import re

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

LABELS, LONG = torch.arange(60) % 6, torch.tensor([0] * 20 + [12] * 12 + [13] * 16)
EYE, NAN, NOTHING = torch.eye(3), torch.full((3, 3), math.nan), torch.zeros(0, dtype=torch.int64)
EPISODES = sample_episodes(LABELS, ways=2, shots=1, queries=3, episodes=2)

REFUSED = [
    (knn_accuracy, {"queries": EYE, "query_labels": [0, 1, 2], "gallery": EYE, "gallery_labels": [0, 1, 2], "k": 1}, [
        ({"query_labels": [7, 8, 9]}, "none of the 3 queries has a candidate of its label"),
        ({"query_labels": ["a", "b", "c"]}, "query_labels are strings, gallery_labels integers"),
        ({"gallery": torch.eye(4), "gallery_labels": [0] * 4}, "queries have dimension 3, the gallery has 4"),
        ({"gallery_labels": None}, "gallery and gallery_labels belong together"),
        ({"k": 0}, "k=0 must be a whole number of at least 1"),
        ({"gallery": None, "gallery_labels": None, "gallery_ids": [0, 1, 2]}, "knn_accuracy: gallery_ids without a gallery. "
         "Pass query_ids= alone, which names the items of one set, or pass the gallery, too."),
        ({"gallery_ids": [0, 1, 2]}, "knn_accuracy: gallery_ids without query_ids. Pass both"),
        ({"temperature": 0.0}, "temperature=0.0 must be a positive number. Pass 0.07, or None"),
    ]),
    (linear_probe, {"queries": EYE, "query_labels": [0, 1, 2], "gallery": EYE, "gallery_labels": [0, 1, 2]}, [
        ({"query_labels": [7, 8, 9]}, "linear_probe: none of the 3 queries has a label of the gallery, so no prediction"),
        ({"gallery_labels": [5, 5, 5]}, "all 3 gallery items have the label 5, and a classifier needs two classes. Pass a"),
        ({"query_labels": list("abc"), "gallery_labels": list("aaa")}, "gallery items have the label 'a', and a classifier"),
        ({"query_labels": ["a", "b", "c"]}, "query_labels are strings, gallery_labels integers"),
        ({"query_labels": [0.0, 1.0, 2.0]}, "query_labels are floats, gallery_labels are classes. Pass floats everywhere "
         "for a regression, or integers or strings everywhere for classes, such as query_labels.long()"),
        ({"query_labels": [0, 1]}, "linear_probe: 3 queries, but 2 query_labels"),
        ({"query_labels": [0.5, 1.5]}, "linear_probe: 3 queries, but 2 query_labels"),
        ({"query_labels": [0.5, 1.5, math.nan]}, "1 of 3 query_labels are NaN, infinite or beyond 1e+100, the first at "
         "index 2. Drop these items from all arguments"),
        ({"query_labels": ["a", "b", None]}, "1 of 3 query_labels is missing, the first (None) at index 2"),
        ({"query_labels": torch.ones(3, 2), "gallery_labels": torch.ones(3, 4)}, "numbers of targets differ: 2 in "
         "query_labels and 4 in gallery_labels. Pass the same targets in the same order"),
        ({"query_labels": torch.ones(3, 1, 1)}, "query_labels have shape (3, 1, 1). Pass floats of shape (items,) or"),
        ({"query_labels": torch.eye(3).long()}, "query_labels.argmax(dim=1) if they are one-hot"),
        ({"query_labels": [0.5] * 3, "gallery": torch.ones(1, 3), "gallery_labels": [0.5]}, "the gallery has a single item, "
         "and a regression needs two. Pass a larger gallery"),
        ({"gallery": torch.ones(1, 3), "gallery_labels": [0]}, "all 1 gallery items have the label 0"),
        ({"queries": NAN}, "linear_probe: 3 of 3 rows of queries hold NaN or Inf, the first at index 0"),
        ({"gallery": NAN}, "linear_probe: 3 of 3 rows of gallery hold NaN or Inf, the first at index 0"),
        ({"gallery": torch.eye(4), "gallery_labels": [0, 1, 0, 1]}, "queries have dimension 3, the gallery has 4"),
        ({"queries": torch.ones(3)}, "linear_probe needs queries of shape (items, dim)"),
        ({"gallery": EYE.long()}, "linear_probe needs floating-point gallery; got torch.int64. Pass gallery.float()"),
        ({"gallery_groups": ["a"] * 3}, "all gallery items are of one group, and a fit without it has no items. Pass"),
        ({"gallery_groups": [1, 2]}, "linear_probe: 3 gallery, but 2 gallery_groups"),
        ({"gallery_groups": [1, 2, 3], "query_groups": list("abc")}, "query_groups are strings, gallery_groups integers"),
        ({"strengths": 0}, "linear_probe: strengths=0 must be a positive number. Pass numbers from 1e-09 to 1e+09, such as"),
        ({"strengths": (1, 1e10)}, "linear_probe: strengths holds 1e+10. Pass numbers from 1e-09 to 1e+09"),
        ({"strengths": ()}, "linear_probe: strengths is empty. Pass numbers"),
        ({"confidence": 95}, "confidence=95 is not between 0 and 1"),
    ]),
    (near_duplicates, {"queries": torch.eye(4)}, [
        ({"min_score": 1.5}, "near_duplicates: no cosine score is compared with min_score=1.5. Cosines lie in [-1, 1]"),
        ({"min_score": 0.1, "similarity": "euclidean"}, "minus the distance"),
        ({"min_score": 1, "similarity": "hamming", "queries": torch.ones(3, 4)}, "minus the number of bits"),
        ({"min_score": math.inf, "similarity": "dot"}, "finite dot product"),
        ({"min_score": "high"}, "min_score='high'"),
        ({"most": -1}, "near_duplicates: most=-1 must be a whole number of at least 0. Pass 0 to only count"),
        ({"gallery": torch.eye(3)}, "queries have dimension 4, the gallery has 3"),
        ({"gallery": torch.full((2, 4), math.inf)}, "near_duplicates: 2 of 2 rows of gallery hold NaN"),
        ({"queries": torch.ones(1, 4)}, "near_duplicates: queries hold a single item, which has no pair"),
    ]),
    (nearest, {"queries": torch.eye(4)}, [
        ({"k": 0}, "nearest: k=0 must be a whole number of at least 1"),
        ({"query_indices": [0, 9]}, "nearest: query_indices holds 9, but queries has 4 items. Pass indices from 0 to 3"),
        ({"query_indices": [-1]}, "query_indices holds -1"),
        ({"query_indices": [0.5]}, "query_indices must be indices"),
        ({"query_indices": []}, "query_indices is empty"),
        ({"gallery": EYE}, "nearest: queries have dimension 4, the gallery has 3"),
        ({"queries": torch.tensor([[0.0], [math.nan]])}, "1 of 2 rows of queries hold NaN or Inf, the first at"),
        ({"queries": torch.ones(1, 4)}, "none of the 1 queries has a candidate. Pass a second item"),
        ({"query_groups": [1, 1, 1, 1]}, "Ids or groups exclude the whole gallery"),
        ({"query_labels": [1, 2, 3]}, "nearest: 4 queries, but 3 query_labels"),
        ({"gallery": torch.eye(4), "query_labels": [1, 2, 3, 4]}, "query_labels, gallery and gallery_labels do not fit"),
        ({"similarity": "cos"}, "similarity='cos' is unknown"),
        ({"similarity": "hamming", "queries": 0.3 * torch.eye(4)}, "binary codes hold"),
        ({"memory_mb": 0}, "memory_mb=0 must be positive"),
    ]),
    (suspects, {"embeddings": torch.eye(4), "labels": [0, 0, 1, 1]}, [
        ({"k": 0}, "suspects: k=0 must be a whole number"),
        ({"labels": [1, 1, 1, 1]}, "suspects: all 4 labels are the same"),
        ({"min_probability": 1.5}, "suspects: min_probability=1.5 must be a probability"),
        ({"embeddings": torch.ones(4)}, "suspects needs embeddings of shape (items, dim)"),
    ]),
    (evaluate_identification, {"queries": EYE, "query_labels": [0, 1, 2], "gallery": EYE, "gallery_labels": [0, 1, 2]}, [
        ({"query_labels": [7, 8, 9]}, "none of the 3 queries has an item of its label in the gallery"),
        ({"query_labels": ["a", "b", "c"]}, "query_labels are strings, gallery_labels integers"),
        ({"query_labels": [0, 1]}, "3 queries, but 2 query_labels"),
        ({"gallery": torch.eye(4)}, "queries have dimension 3, the gallery has 4"),
        ({"metrics": ("tpir@far0.1",)}, "did you mean 'tpir@fpir0.1'?"),
        ({"queries": NAN}, "3 of 3 rows of queries hold NaN"),
    ]),
    (evaluate_trials, {"scores": [0.9, 0.8, 0.2, 0.1], "same": [1, 0, 1, 0]}, [
        ({"scores": [0.1, math.nan, math.inf, 2e300]}, "3 of 4 scores are NaN, infinite or beyond 1e+300, the first at"),
        ({"scores": [[0.1], [0.2, 0.3]]}, "scores is a list that cannot be converted to a tensor"),
        ({"scores": np.full(4, 1j)}, "scores hold complex numbers, which have no order. Pass real ones"),
        ({"same": [1, 0, 2, 0]}, "same holds 2 at index 2. Pass True"),
        ({"same": [True] * 4}, "all 4 trials are target trials, and every rate needs trials of both kinds. Add non-target"),
        ({"same": [False] * 4}, "all 4 trials are non-target trials"),
        ({"same": [True, False]}, "4 scores, but 2 same"),
        ({"scores": [], "same": []}, "needs scores of shape (trials,); got (0,)"),
        ({"first": list("abcd")}, "first and second belong together"),
        ({"first": list("abc"), "second": list("abcd")}, "4 scores, but 3 first"),
        ({"first": list("aabb"), "second": list("abbb")}, "in 1 of 4 trials `same` and the identities disagree, the first "
         "at index 3: same is False, and the identities are one"),
        ({"folds": [0, 0, 1, 2]}, "fold 1 has 1 trials, all target trials. Give each fold trials of both kinds"),
        ({"folds": list("aaaa")}, "folds has the single fold 'a'. Pass at least two"),
        ({"metrics": ("accuracy",)}, "accuracy needs folds, and there are none. Pass folds="),
        ({"metrics": ("tar@fmr0.1",)}, "there is no metric 'tar@fmr0.1'; did you mean 'tar@far0.1'?"),
        ({"metrics": ("min_dcf@1",)}, "min_dcf@1 has no non-target trial to accept wrongly. Pass"),
        ({"metrics": ()}, "metrics are empty. Ask for at least one, such as metrics=('eer',)"),
        ({"miss_cost": 0}, "miss_cost=0 must be a positive number"),
        ({"confidence": 95}, "confidence=95 is not between 0 and 1"),
    ]),
    (embedding_health, {"embeddings": torch.ones(5, 2)}, [
        ({"embeddings": NAN}, "embedding_health: 3 of 3 rows of embeddings hold NaN or Inf, the first at index 0"),
        ({"embeddings": torch.ones(0, 2)}, "Pass at least one item"),
        ({"labels": [0, 1]}, "embedding_health: 5 embeddings, but 2 labels"),
        ({"k": 1}, "embedding_health: k=1 must be a whole number of at least 2"),
    ]),
    (discriminant_ratio, {"embeddings": torch.ones(6, 2), "labels": torch.arange(6)}, [
        ({"embeddings": torch.ones(6, 2, 2)}, "discriminant_ratio needs floating-point embeddings of shape (items, dim); "
         "got torch.float32 of shape (6, 2, 2). Flatten what belongs to one item: embeddings.flatten(1)"),
        ({"embeddings": torch.ones(6, 2).long()}, "got torch.int64"),
        ({"labels": torch.arange(5)}, "needs one label for each of the 6 embeddings; got 5 labels"),
        ({"labels": torch.ones(6)}, "discriminant_ratio needs integer labels; got torch.float32"),
    ]),
    (variance_ratio, {}, [
        ({"embeddings": torch.ones(6), "labels": torch.arange(6)}, "variance_ratio needs floating-point embeddings of"),
    ]),
    (variance_ratio_of_set, {"embeddings": torch.ones(6, 2)}, [
        ({"embeddings": torch.ones(6), "labels": torch.arange(6)}, "variance_ratio_of_set needs floating-point embeddings"),
        ({"labels": torch.arange(6), "confidence": 95}, "confidence=95 is not between 0 and 1"),
        ({}, "variance_ratio_of_set(embeddings) needs labels. Pass one integer or string for each embedding"),
    ]),
    (evaluate_retrieval, {"queries": torch.eye(6).sign(), "query_labels": torch.arange(6), "similarity": "hamming"}, [
        ({"gallery": torch.ones(3, 5), "gallery_labels": [0, 1, 2]}, "of 6 bits cannot be compared with a gallery of 5"),
        ({"gallery": torch.ones(3, 6)}, "gallery and gallery_labels belong together"),
        ({"metrics": ("prototype_accuracy",)}, "binary codes have no mean that could be a prototype"),
        ({"query_labels": [0, 1]}, "6 query codes, but 2 query_labels"),
        ({"queries": torch.tensor([[1, -1], [0.5, 2]])}, "binary codes hold -1 and +1, or 0 and 1; 2 of 4 values of"),
        ({"queries": NAN}, "9 of 9 values of queries are neither (nan, nan, nan, ...)"),
        ({"queries": torch.tensor([[1, -1, 0]])}, "hold -1 and 0"),
        ({"queries": torch.ones(3)}, "have shape (3,); codes are (items, bits)"),
        ({"queries": torch.ones(3, 0)}, "have shape (3, 0)"),
    ]),
    (SoftAveragePrecisionLoss, {}, [
        ({"bins": 1}, "bins=1) must be a whole number from 2 on"),
        ({"similarity": "dot"}, "Choose one of cosine, euclidean, hamming"),
        ({"on_empty": "nan"}, "Choose raise or zero"),
        ({"low": 1.0}, "low=1.0, high=1.0) is not a range"),
        ({"similarity": "hamming", "bins": 9}, "Leave out bins"),
    ]),
    (SoftAveragePrecisionLoss(), {"queries": torch.randn(4, 3), "query_labels": [0, 0, 1, 1]}, [
        ({"queries": NAN, "query_labels": [0, 0, 1]}, "3 of 3 rows of queries hold NaN or Inf, the first at index 0"),
        ({"query_labels": [0, 0, 1]}, "4 queries, but 3 query_labels"),
        ({"gallery": EYE}, "belong together"),
        ({"gallery": torch.randn(4, 2), "gallery_labels": [0, 0, 1, 1]}, "dimension 3, but a gallery of dimension 2"),
        ({"query_labels": [0, 1, 2, 3]}, "none of the 4 items of the batch has another item of its class"),
    ]),
    (BinaryCodes, {}, [({"temperature": 0}, "must be above 0")]),
    (trial_scores, {"embeddings": EYE}, [
        ({"first": [0], "second": [3]}, "trial_scores: second holds 3, but embeddings has 3 items"),
        ({"first": [], "second": []}, "first is empty. Pass the index of at least one of the 3 embeddings"),
        ({"first": [0], "second": [1, 2]}, "first has 1 items, second 2. Pass one of each"),
    ]),
    (sample_episodes, {"labels": LONG, "ways": 2}, [
        ({}, "2-way 1-shot with 15 queries needs 16 images per class; class 12 has 12. Use queries <= 11 or drop"),
        ({"queries": 18, "class_names": {12: "heron"}}, "class 'heron' has 12, the smallest of 2 classes that are too "
         "small. Use queries <= 11 or drop these classes."),
        ({"shots": 12, "queries": 1}, "class 12 has 12. Use shots 1 with queries <= 11 or drop"),
        ({"labels": torch.arange(2), "queries": 1}, "class 0 has 1, the smallest of 2 classes that are too small. Drop"),
        ({"labels": LABELS, "class_names": list("abcdef")}, "class 'a' has 10, the smallest of 6 classes"),
        ({"class_names": ["a"]}, "class 12 has 12"),
        ({"ways": 4}, "4-way episodes need 4 classes; the labels hold 3. Use ways <= 3 or add classes."),
        ({"labels": NOTHING}, "2-way episodes need 2 classes; the labels hold 0. Pass the labels"),
        ({"labels": LABELS.float()}, "sample_episodes needs integer labels; got torch.float32"),
        ({"shots": 0}, "shots is 0; an episode needs at least one. Use shots >= 1."),
        ({"queries": 1.5}, "queries is 1.5; expected a whole number. Use queries >= 1."),
    ]),
    (split_episode, {"embeddings": torch.randn(4, 2), "labels": [0, 0, 1, 1], "shots": 1}, [
        ({"labels": [0, 0, 0, 1]}, "class 1 has 1 and class 0 has 3. Pass a batch drawn by an EpisodicBatchSampler"),
        ({"shots": 2}, "2-shot leaves no query: each of the 2 classes has 2 rows. Use shots <= 1"),
        ({"labels": [0, 1, 2, 3]}, "1-shot leaves no query: each of the 4 classes has 1 row. Draw more images"),
        ({"labels": [0, 0]}, "4 embeddings came with 2 labels"),
        ({"embeddings": torch.randn(0, 2), "labels": NOTHING}, "The episode is empty: 0 embeddings"),
    ]),
    (split_episodes, {"embeddings": torch.zeros(8, 2), "labels": [0, 0, 1, 1, 2, 2, 3, 3], "shots": 1, "episodes": 2}, [
        ({"episodes": 3}, "8 embeddings with labels of shape (8,) do not form a batch of 3 episodes of the same size"),
        ({"labels": [0, 0, 1, 1, 5, 5, 5, 5]}, "Episode 1 of the 2 of the batch has 1 classes, the first has 2"),
        ({"labels": [0, 1, 0, 1, 1, 1, 1, 0]}, "Episode 1 of the 2 of the batch: An episode has equally many rows of each "
         "class; class 0 has 1 and class 1 has 3"),
        ({"labels": [0, 1, 2, 3, 0, 1, 2, 3]}, "1-shot leaves no query"),
    ]),
    (summarize_accuracies, {"accuracies": torch.tensor([0.5, 0.6]), "episode_list": EPISODES}, [
        ({"accuracies": torch.empty(0)}, "0 episodes were measured"),
        ({"accuracies": torch.tensor([0.5])}, "1 accuracies came with a list of 2 episodes, so its hash would not name "
         "what was measured. Measure every episode once, or pass `episode_list.first(n)`"),
        ({"accuracies": torch.tensor([50.0, 60.0])}, "found 50 to 60. Pass fractions, not percentages"),
        ({"accuracies": torch.tensor([0.5, math.nan])}, "no NaN"),
    ]),
    (class_subset, {"labels": torch.arange(3)}, [
        ({"classes": 0}, "class_subset: classes=0 must be at least 1"),
        ({"items_per_class": 0}, "class_subset: items_per_class=0 must be at least 1"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [(function, good | wrong, message) for function, good, rows in REFUSED for wrong, message in rows],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_what_is_given_wrongly_is_refused_with_the_fix(function, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        function(**arguments)
