"""A call of each function that takes embeddings and labels, by name."""

import torch

from fewshot_callbacks import evaluate_retrieval, functional
from fewshot_callbacks.data import ClassBalancedBatchSampler, EpisodicBatchSampler

EPISODE_SIZES = {"ways": 3, "shots": 1, "queries": 3, "episodes": 7}


def moments(items, labels):
    first = functional.ClassMoments.of(items[:20], labels[:20])
    second = functional.ClassMoments.of(items[20:], labels[20:])
    return first.merge(second).merge(functional.ClassMoments.nothing(items.shape[1])).discriminant_ratio()


def probe(items, labels):
    report = functional.linear_probe(items[:30], labels[:30], items[30:], labels[30:])
    return [*report.values.values(), report.strength, *report.errors.values()]


CALLS_WITH_LABELS = {
    "evaluate_retrieval": lambda items, labels: list(evaluate_retrieval(items, labels, label_groups=2).values.values()),
    "grouped_recall": lambda items, labels: functional.grouped_recall(items, labels, label_groups=2, repeats=3).at[1],
    "linear_probe": probe,
    "nearest": lambda items, labels: functional.nearest(items, labels, query_indices=[0, 5, 9], k=3).indices,
    "suspects": lambda items, labels: functional.suspects(items, labels, k=4, min_probability=0).log_odds,
    "discriminant_ratio": lambda items, labels: functional.discriminant_ratio(items, labels, skip_singletons=True),
    "variance_ratio": functional.variance_ratio,
    "moments": moments,
    "variance_ratio_of_set": lambda items, labels: functional.variance_ratio_of_set(items, labels).interval,
    "clustered_mean_interval": lambda items, labels: functional.clustered_mean_interval(items[:, 0].sigmoid(), labels),
    "paired_difference_interval": lambda items, labels: functional.paired_difference_interval(
        items[:, 0].sin(), labels
    ),
    "class_subset": lambda items, labels: functional.class_subset(labels, 3, 2),
    "sample_episodes": lambda items, labels: functional.sample_episodes(labels, **EPISODE_SIZES).indices,
    "EpisodicBatchSampler": lambda items, labels: list(EpisodicBatchSampler(labels, **EPISODE_SIZES)),
    "ClassBalancedBatchSampler": lambda items, labels: list(
        ClassBalancedBatchSampler(labels, classes_per_batch=3, items_per_class=2)
    ),
    "split_episode": lambda items, labels: torch.cat(functional.split_episode(items, labels, shots=2), dim=1),
    "training_dynamics": lambda items, labels: functional.training_dynamics(items, items.sin(), labels, shots=2).alpha,
}
