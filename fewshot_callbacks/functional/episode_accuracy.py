"""The accuracy over many episodes, with its intervals and its difference from another one."""

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
    """The mean accuracy over a list of episodes, with its spread.

    Attributes:
        mean: In [0, 1].
        std: Sample standard deviation over episodes (divisor n - 1); NaN for one episode.
        ci95: 1.96 * std / sqrt(n), which few-shot papers print after ±, for comparison with their tables. With some
            hundred episodes it is as accurate as `interval`; NaN for one episode. Like that, it says nothing of other
            classes.
        n: Number of episodes.
        ways: Classes in an episode.
        shots: Support images of each class.
        queries: Query images of each class.
        episodes_hash: `EpisodeList.hash` of the episodes.
        batch_statistics: True where batch normalisation used the statistics of the episode itself. Such an accuracy
            uses all queries together, and must not be compared with one that does not.
        per_episode: The accuracy of each episode, float64, for `minus`; None if it was not kept.
        classes: The classes of each episode, for `open_interval`; None if they are not known.

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
        """The 95 % interval in which the mean of another test set lies, of other classes and their images.

        It is wider than `interval`, by a factor of about ten where there are 20 classes. NaN if the classes are not known,
        or fewer than three more than an episode has.
        """
        if self.per_episode is None or self.classes is None:
            return UNKNOWN
        return interval_over_classes(self.per_episode, self.classes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons why values are NaN: `std` and `ci95` of one episode, `open_interval` of too few or unknown classes."""
        notes = []
        if math.isnan(self.ci95):
            notes.append("accuracy_std and accuracy_ci95 are NaN: there is one episode. Evaluate several.")
        if math.isnan(self.open_interval.low):
            reason = "the classes of the episodes are not known."
            if self.classes is not None and self.per_episode is not None:
                classes = len(self.classes.unique())
                reason = (
                    f"{self.ways}-way episodes need {self.ways + SPARE_CLASSES} classes or more for it, and there are "
                    f"{classes}. Evaluate with fewer ways, or on more classes."
                )
            notes.append(f"accuracy_ci95_open, the interval over other classes, is NaN: {reason}")
        return tuple(notes)

    @property
    def interval(self) -> Interval:
        """The 95 % interval of the mean over other episodes of these classes and images: the closed one.

        Also valid for few episodes and near 1 (see `mean_interval`).
        """
        if self.per_episode is not None:
            return mean_interval(self.per_episode)
        if self.n < 2:
            return Interval(math.nan, math.nan)
        return share_interval(self.mean, self.std / math.sqrt(self.n), self.n - 1, self.n, 0.95)

    def minus(self, other: EpisodeAccuracy, *, over_classes: bool = False) -> Difference:
        """Return the difference from another accuracy, with its 95 % interval.

        Accuracies of the same list of episodes are compared episode by episode.

        The interval shows how far other episodes of the same classes would move the difference (closed), or, if asked for,
        another set of classes (open).

        Args:
            other: The accuracy of another model.
            over_classes: Give the open interval.

        Returns:
            The difference of the means, in [-1, 1]; its interval is NaN where the lists differ and one has a single
            episode. An open one is NaN where the lists differ, or `open_interval` is. If every episode of one list has the
            same accuracy by both, it is 0 to 0.

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
            raise InputError(
                "One accuracy was measured with the batch statistics of its episodes, the other was not; they cannot be "
                "compared. Evaluate both in the same way."
            )
        return Difference(self.mean, other.mean, self._interval_of_difference(other, over_classes=over_classes))

    def _interval_of_difference(self, other: EpisodeAccuracy, *, over_classes: bool) -> Interval:
        """Return the interval of the difference: paired if both accuracies are of the same list of episodes."""
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
        """The episodes that were evaluated: their number, their sizes and the hash of their list."""
        statistics = ", batch statistics" if self.batch_statistics else ""
        number = f"{self.n} episode{'' if self.n == 1 else 's'}"
        return f"{number}, {self.ways}-way {self.shots}-shot{statistics}, hash {self.episodes_hash}"

    def __str__(self) -> str:
        spread = "" if math.isnan(self.ci95) else f" ± {100 * self.ci95:.2f}"
        return f"{100 * self.mean:.2f}{spread} % ({self.episodes_in_words})"


def summarize_accuracies(
    accuracies: Float[Tensor, "episodes"], episode_list: EpisodeList, *, batch_statistics: bool = False
) -> EpisodeAccuracy:
    """Return the mean of one accuracy for each episode, with its 95 % confidence interval.

    `ci95` is the interval of few-shot papers, mean ± 1.96 std / sqrt(n); `interval` is also valid for few episodes.
    Both show how far another list of episodes of the same classes would move the mean; `open_interval` shows how far
    other classes would.

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
        raise InputError("No accuracy to summarise: 0 episodes were measured. Measure at least one.")
    if n != len(episode_list):
        raise InputError(
            f"{n} accuracies came with a list of {len(episode_list)} episodes, so its hash would not name what was "
            "measured. Measure every episode once, or pass `episode_list.first(n)`."
        )
    values = accuracies.detach().to("cpu", torch.float64)
    if not bool(((values >= 0) & (values <= 1)).all()):
        raise InputError(
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
        classes=episode_list.classes,
    )
