"""Mean accuracy over episodes, with intervals and paired differences."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional.episodes import EpisodeList
from fewshot_callbacks.functional.means import exact_mean
from fewshot_callbacks.functional.statistics import (
    EQUAL,
    SPARE_CLASSES,
    UNKNOWN,
    Difference,
    Interval,
    are_all_zero,
    independent_difference_interval,
    interval_over_classes,
    mean_interval,
    paired_difference_interval,
    share_interval,
)


@equal_with_nan
@dataclass(frozen=True)
class EpisodeAccuracy:
    """The result of `summarize_accuracies`: the mean accuracy over a list of episodes, with its spread.

    Attributes:
        mean: Mean accuracy, in [0, 1].
        std: Sample standard deviation over episodes (divisor n - 1); NaN for one episode.
        ci95: 1.96 * std / sqrt(n), which few-shot papers print after ±. With a few hundred episodes it is as accurate as
            `interval`. Like `interval`, it does not account for other classes. NaN for one episode.
        n: Number of episodes.
        ways: Number of classes per episode.
        shots: Number of support images per class.
        queries: Number of query images per class.
        episodes_hash: `EpisodeList.hash` of the episodes.
        batch_statistics: Whether batch normalisation used the statistics of the episode itself. Such an accuracy uses all
            queries together, so do not compare it with one that does not.
        per_episode: Accuracy of each episode, float64, for `minus`; None if it was not kept.
        classes: Classes of each episode, for `open_interval`; None if they are not known.

    References:
        Lafargue, Smith, Vermet et al., "Oops, I sampled it again: reinterpreting confidence intervals in few-shot
        learning", arXiv 2409.02850, 2024: closed and open intervals.

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
    classes: Int[Tensor, "n ways"] | None = field(default=None, compare=False, repr=False)

    @property
    def open_interval(self) -> Interval:
        """The 95 % interval of the mean for another test set, with other classes and images (open interval).

        It is wider than `interval`, about ten times for 20 classes. NaN if the classes are not known, or unless there are at
        least three classes more than an episode has.
        """
        if self.per_episode is None or self.classes is None:
            return UNKNOWN
        return interval_over_classes(self.per_episode, self.classes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons why values are NaN: `std` and `ci95` for one episode, `open_interval` for too few or unknown classes."""
        notes = []
        if math.isnan(self.ci95):
            notes.append("accuracy_std and accuracy_ci95 are NaN, because there is one episode. Evaluate several.")
        if math.isnan(self.open_interval.low):
            reason = "the classes of the episodes are not known."
            if self.classes is not None and self.per_episode is not None:
                classes = len(self.classes.unique())
                reason = (
                    f"{self.ways}-way episodes need at least {self.ways + SPARE_CLASSES} classes, but there are {classes}. "
                    "Evaluate with fewer ways, or on more classes."
                )
            notes.append(f"accuracy_ci95_open, the interval for other classes, is NaN: {reason}")
        return tuple(notes)

    @property
    def interval(self) -> Interval:
        """The 95 % interval of the mean for other episodes of the same classes and images (closed interval).

        It is also valid for few episodes and near 1 (see `mean_interval`).
        """
        if self.per_episode is not None:
            return mean_interval(self.per_episode)
        if self.n < 2:
            return Interval(math.nan, math.nan)
        return share_interval(self.mean, self.std / math.sqrt(self.n), self.n - 1, self.n, 0.95)

    def minus(self, other: EpisodeAccuracy, *, over_classes: bool = False) -> Difference:
        """Return the difference from another accuracy, with its 95 % interval.

        Accuracies on the same list of episodes are compared episode by episode. The interval shows how much the difference
        would change with other episodes of the same classes (closed interval) or, with `over_classes`, with other classes
        (open interval).

        Args:
            other: The accuracy of another model.
            over_classes: Return the open interval.

        Returns:
            The difference of the means, in [-1, 1]. The closed interval is NaN if the lists differ and one has a single
            episode. The open interval is NaN if the lists differ, or if `open_interval` is NaN. The interval is 0 to 0 if
            both accuracies are equal in every episode of one list.

        Raises:
            ValueError: If only one of the two used batch statistics.

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
            raise InputError(
                "One accuracy was measured with the batch statistics of its episodes and the other was not, so they "
                "cannot be compared. Evaluate both in the same way."
            )
        return Difference(self.mean, other.mean, self._interval_of_difference(other, over_classes=over_classes))

    def _interval_of_difference(self, other: EpisodeAccuracy, *, over_classes: bool) -> Interval:
        """Return the interval of the difference, paired if both accuracies are on the same list of episodes."""
        if self.per_episode is None or other.per_episode is None or self.episodes_hash != other.episodes_hash:
            if over_classes:
                return UNKNOWN
            return independent_difference_interval(self.mean, self.interval, other.mean, other.interval)
        by_episode = self.per_episode - other.per_episode
        if not over_classes:
            return EQUAL if are_all_zero(by_episode) else paired_difference_interval(by_episode)
        if self.classes is None:
            return UNKNOWN
        return interval_over_classes(by_episode, self.classes, of_difference=True)

    @property
    def episodes_in_words(self) -> str:
        """Number, sizes and hash of the evaluated episodes, as printed."""
        statistics = ", batch statistics" if self.batch_statistics else ""
        number = f"{self.n} episode{'' if self.n == 1 else 's'}"
        return f"{number}, {self.ways}-way {self.shots}-shot{statistics}, hash {self.episodes_hash}"

    def __str__(self) -> str:
        spread = "" if math.isnan(self.ci95) else f" ± {100 * self.ci95:.2f}"
        return f"{100 * self.mean:.2f}{spread} % ({self.episodes_in_words})"


def summarize_accuracies(
    accuracies: Float[Tensor, "episodes"], episode_list: EpisodeList, *, batch_statistics: bool = False
) -> EpisodeAccuracy:
    """Return the mean over the accuracies of episodes, with 95 % confidence intervals.

    `ci95` is the interval of few-shot papers, mean ± 1.96 std / sqrt(n). `interval` is also valid for few episodes.
    Both show how much the mean would change with other episodes of the same classes. `open_interval` shows how much it
    would change with other classes.

    Args:
        accuracies: (episodes,) accuracies in [0, 1], in the order of the episodes.
        episode_list: All measured episodes.
        batch_statistics: Whether batch normalisation used the statistics of each episode.

    Returns:
        The summary, computed in float64. `std` and `ci95` are NaN for one episode.

    Raises:
        ValueError: If there are no accuracies, their number differs from the number of episodes, or one is not in [0, 1].

    Examples:
        >>> from fewshot_callbacks.functional import sample_episodes
        >>> episodes = sample_episodes(torch.arange(40) % 4, ways=2, shots=1, queries=5, episodes=4)
        >>> result = summarize_accuracies(torch.tensor([0.5, 0.7, 0.6, 0.6]), episodes)
        >>> f"{result.mean:.2f} {result.std:.4f} {result.ci95:.4f}"
        '0.60 0.0816 0.0800'
    """
    n = len(accuracies)
    if n == 0:
        raise InputError("summarize_accuracies: 0 episodes were measured. Measure at least one.")
    if n != len(episode_list):
        raise InputError(
            f"summarize_accuracies: {n} accuracies do not fit a list of {len(episode_list)} episodes, and its hash would be "
            "wrong. Measure every episode once, or pass `episode_list.first(n)`."
        )
    values = accuracies.detach().to("cpu", torch.float64)
    if not bool(((values >= 0) & (values <= 1)).all()):
        raise InputError(
            f"summarize_accuracies: accuracies must be in [0, 1], but found {values.min().item():g} to "
            f"{values.max().item():g}. Pass fractions instead of percentages, without NaN."
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
        classes=episode_list.classes,
    )
