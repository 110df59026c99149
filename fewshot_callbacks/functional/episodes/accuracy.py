"""Accuracy over episodes, with its interval."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from fewshot_callbacks.functional.episodes.sampling import EpisodeList
from fewshot_callbacks.functional.statistics.class_means import exact_mean
from fewshot_callbacks.functional.statistics.intervals import (
    Difference,
    Interval,
    independent_difference_interval,
    mean_interval,
    paired_difference_interval,
    share_interval,
)


@dataclass(frozen=True)
class EpisodeAccuracy:
    """The mean accuracy over a list of episodes, with its spread.

    Attributes:
        mean: In [0, 1].
        std: Sample standard deviation over episodes (divisor n - 1); NaN for one episode.
        ci95: 1.96 * std / sqrt(n), which few-shot papers print after ±, for comparison with their tables. With some
            hundred episodes it is as accurate as `interval`; NaN for one episode.
        n: Number of episodes.
        ways: Classes in an episode.
        shots: Support images of each class.
        queries: Query images of each class.
        episodes_hash: `EpisodeList.hash` of the episodes.
        batch_statistics: True where batch normalisation used the statistics of the episode itself. Such an accuracy
            uses all queries together, and must not be compared with one that does not.
        per_episode: The accuracy of each episode, float64, for `minus`; None if it was not kept.

    Examples:
        >>> result = EpisodeAccuracy(0.5713, 0.1187, 0.0095, 600, 5, 1, 15, "1a2b3c4d5e6f")
        >>> print(result)
        57.13 ± 0.95 % (600 episodes, 5-way 1-shot, hash 1a2b3c4d5e6f)
    """

    mean: float
    std: float
    ci95: float
    n: int
    ways: int
    shots: int
    queries: int
    episodes_hash: str
    batch_statistics: bool = False
    per_episode: Float[Tensor, "n"] | None = field(default=None, compare=False, repr=False)

    @property
    def interval(self) -> Interval:
        """The 95 % interval of the mean, also valid for few episodes and near 1 (see `mean_interval`)."""
        if self.per_episode is not None:
            return mean_interval(self.per_episode)
        if self.n < 2:
            return Interval(math.nan, math.nan)
        return share_interval(self.mean, self.std / math.sqrt(self.n), self.n - 1, self.n, 0.95)

    def minus(self, other: "EpisodeAccuracy") -> Difference:
        """Compute the difference from another accuracy, with its 95 % interval.

        Accuracies of the same list of episodes are compared episode by episode.

        The interval shows how far other episodes of the same classes would move the difference.

        Args:
            other: The accuracy of another model.

        Returns:
            The difference of the means, in [-1, 1]; its interval is NaN where the lists differ and one has a single
            episode.

        Raises:
            ValueError: Only one of the two used batch statistics.

        Examples:
            >>> from fewshot_callbacks.functional import sample_episodes
            >>> episodes = sample_episodes(torch.arange(40) % 4, ways=2, shots=1, queries=5, episodes=3)
            >>> better = summarize_accuracies(torch.tensor([0.5, 0.7, 0.9]), episodes)
            >>> worse = summarize_accuracies(torch.tensor([0.4, 0.6, 0.7]), episodes)
            >>> difference = better.minus(worse)
            >>> f"{difference.value:.3f} {difference.interval.low:.3f}", difference.is_beyond_chance
            ('0.133 0.036', True)
        """
        if self.batch_statistics != other.batch_statistics:
            raise ValueError(
                "One accuracy was measured with the batch statistics of its episodes, the other was not; they cannot be "
                "compared. Evaluate both in the same way."
            )
        if self.per_episode is not None and other.per_episode is not None and self.episodes_hash == other.episodes_hash:
            interval = paired_difference_interval(self.per_episode - other.per_episode)
        else:
            interval = independent_difference_interval(self.mean, self.interval, other.mean, other.interval)
        return Difference(self.mean, other.mean, interval)

    def __str__(self) -> str:
        spread = "" if math.isnan(self.ci95) else f" ± {100 * self.ci95:.2f}"
        statistics = ", batch statistics" if self.batch_statistics else ""
        return (
            f"{100 * self.mean:.2f}{spread} % ({self.n} episode{'' if self.n == 1 else 's'}, "
            f"{self.ways}-way {self.shots}-shot{statistics}, hash {self.episodes_hash})"
        )


def summarize_accuracies(
    accuracies: Float[Tensor, "episodes"], episode_list: EpisodeList, *, batch_statistics: bool = False
) -> EpisodeAccuracy:
    """Average one accuracy per episode, with its 95 % confidence interval.

    `ci95` is the interval of few-shot papers, mean ± 1.96 std / sqrt(n); `interval` is also valid for few episodes.
    Both show how far another list of episodes of the same classes would move the mean, not how far other classes would.

    Args:
        accuracies: (episodes,), each in [0, 1], in any order.
        episode_list: The list of all episodes that were measured.
        batch_statistics: See `EpisodeAccuracy`.

    Returns:
        The summary, computed in float64. One episode gives NaN for `std` and `ci95`.

    Raises:
        ValueError: There is no accuracy, their number is not that of the episodes, or one of them is not in [0, 1].

    Examples:
        >>> from fewshot_callbacks.functional import sample_episodes
        >>> episodes = sample_episodes(torch.arange(40) % 4, ways=2, shots=1, queries=5, episodes=4)
        >>> result = summarize_accuracies(torch.tensor([0.5, 0.7, 0.6, 0.6]), episodes)
        >>> f"{result.mean:.2f} {result.std:.4f} {result.ci95:.4f}"
        '0.60 0.0816 0.0800'
    """
    n = len(accuracies)
    if n == 0:
        raise ValueError("No accuracy to summarise: 0 episodes were measured. Measure at least one.")
    if n != len(episode_list):
        raise ValueError(
            f"{n} accuracies came with a list of {len(episode_list)} episodes, so its hash would not name what was "
            "measured. Measure every episode once, or pass `episode_list.first(n)`."
        )
    values = accuracies.detach().to("cpu", torch.float64)
    if not bool(((values >= 0) & (values <= 1)).all()):
        raise ValueError(
            f"Accuracies lie in [0, 1]; found {values.min().item():g} to {values.max().item():g}. Pass fractions, not "
            "percentages, and no NaN."
        )
    std = values.std().item() if n > 1 else math.nan
    return EpisodeAccuracy(
        mean=exact_mean(values),
        std=std,
        ci95=1.96 * std / math.sqrt(n),
        n=n,
        ways=episode_list.ways,
        shots=episode_list.shots,
        queries=episode_list.queries,
        episodes_hash=episode_list.hash,
        batch_statistics=batch_statistics,
        per_episode=values,
    )
