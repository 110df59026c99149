"""Episodes: sampling, splitting into support and queries, accuracy."""

from fewshot_callbacks.functional.episodes.accuracy import EpisodeAccuracy, summarize_accuracies
from fewshot_callbacks.functional.episodes.protocol import EpisodeProtocol
from fewshot_callbacks.functional.episodes.sampling import (
    ClassNames,
    EpisodeList,
    check_classes_suffice,
    check_episode_sizes,
    class_name,
    sample_episodes,
)
from fewshot_callbacks.functional.episodes.splitting import split_episode, split_episodes

__all__ = [
    "ClassNames",
    "EpisodeAccuracy",
    "EpisodeList",
    "EpisodeProtocol",
    "check_classes_suffice",
    "check_episode_sizes",
    "class_name",
    "sample_episodes",
    "split_episode",
    "split_episodes",
    "summarize_accuracies",
]
