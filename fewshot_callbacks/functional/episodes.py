"""Episodes: which images make up each small classification problem, how to cut a batch into one, what many of them say.

An episode is `ways` classes with `shots` support images and `queries` query images each (Vinyals et al., "Matching
networks for one shot learning", NeurIPS 2016). Everything here is a function of the labels and a seed: no data set, no
global random state, no processes.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.functional._labels import as_labels
from fewshot_callbacks.functional.averages import exact_mean
from fewshot_callbacks.functional.intervals import (
    Difference,
    Interval,
    independent_difference_interval,
    mean_interval,
    paired_difference_interval,
    share_interval,
)

ClassNames = Sequence[str] | Mapping[int, str]


@dataclass(frozen=True, eq=False)
class EpisodeList:
    """A list of episodes, as positions in the data set.

    Attributes:
        indices: int64 on the CPU, (episodes, ways, shots + queries); in each row, which is one class, the first `shots`
            positions are the support and the rest the queries. No position occurs twice in an episode.
        ways: Classes in an episode.
        shots: Support images of each class.
        queries: Query images of each class.

    Raises:
        ValueError: The sizes of `indices` are not `ways` and `shots + queries`.

    Example:
        >>> episodes = sample_episodes(torch.arange(40) % 4, ways=2, shots=1, queries=2, episodes=3)
        >>> len(episodes), tuple(episodes[0].shape)
        (3, (2, 3))
    """

    indices: Int[Tensor, "episodes ways images"]
    ways: int
    shots: int
    queries: int

    def __post_init__(self) -> None:
        found, expected = tuple(self.indices.shape[1:]), (self.ways, self.shots + self.queries)
        if found != expected:
            raise ValueError(
                f"indices have {found} classes and images per episode; {self.ways}-way {self.shots}-shot with "
                f"{self.queries} queries makes {expected}. Pass indices of shape (episodes, ways, shots + queries)."
            )

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, episode: int) -> Int[Tensor, "ways images"]:
        return self.indices[episode]

    def first(self, n: int) -> "EpisodeList":
        """The list of the first `n` episodes (all of them if there are fewer), with its own hash.

        Raises:
            ValueError: `n` is negative.

        Example:
            >>> len(sample_episodes(torch.arange(40) % 4, ways=2, queries=2, episodes=9).first(5))
            5
        """
        if n < 0:
            raise ValueError(f"first({n}) asks for a negative number of episodes. Use n >= 0.")
        return EpisodeList(self.indices[:n], self.ways, self.shots, self.queries)

    @cached_property
    def hash(self) -> str:
        """Twelve hexadecimal characters that two runs can log to prove that they used the same episodes.

        The start of the SHA-256 of the sizes (episodes, ways, shots, queries) and the positions, both as little-endian
        int64; the same on every machine.

        Example:
            >>> labels = torch.arange(40) % 4
            >>> one, same = (sample_episodes(labels, ways=2, queries=2, episodes=9, seed=1) for _ in range(2))
            >>> one.hash == same.hash, one.hash == one.first(8).hash
            (True, False)
        """
        sizes = torch.tensor([len(self), self.ways, self.shots, self.queries])
        digest = hashlib.sha256()
        for part in (sizes, self.indices):
            digest.update(part.cpu().contiguous().numpy().astype("<i8").tobytes())
        return digest.hexdigest()[:12]


def sample_episodes(
    labels: Any,
    *,
    ways: int = 5,
    shots: int = 1,
    queries: int = 15,
    episodes: int = 600,
    seed: int = 0,
    class_names: ClassNames | None = None,
) -> EpisodeList:
    """Draw episodes: classes without replacement, then images of each class without replacement, all equally likely.

    Every class is as likely as any other, however many images it has, and episodes are independent of each other. The
    result depends on the arguments alone: global random state is neither read nor moved, and workers, threads and
    ranks do not enter.

    Args:
        labels: (items,), the class of each item: integers or words, in any order, as a tensor, array or list.
        ways: Classes in an episode.
        shots: Support images of each class.
        queries: Query images of each class.
        episodes: Length of the list.
        seed: Any integer that `torch.Generator.manual_seed` accepts.
        class_names: Names for the error messages, by label: a sequence for labels 0, 1, 2, ..., or a mapping; for words
            these themselves.

    Returns:
        The episodes; see `EpisodeList`.

    Raises:
        ValueError: Labels are not one integer or word for each item; a number is not positive; there are fewer than `ways`
            classes; or a class has fewer than `shots + queries` images. No class is skipped in silence.

    Example:
        >>> labels = torch.tensor([7, 7, 7, -1, -1, -1])
        >>> episode = sample_episodes(labels, ways=2, shots=1, queries=2, episodes=1)[0]
        >>> sorted(episode.flatten().tolist())
        [0, 1, 2, 3, 4, 5]
        >>> [labels[row].unique().numel() for row in episode]  # a row is one class
        [1, 1]
        >>> sample_episodes(labels, ways=2, shots=1, queries=3, class_names={7: "heron", -1: "owl"})
        Traceback (most recent call last):
        ValueError: 2-way 1-shot with 3 queries needs 4 images per class; class 'owl' has 3, the smallest of 2 classes
        that are too small. Use queries <= 2 or drop these classes.
    """
    check_episode_sizes(ways=ways, shots=shots, queries=queries, episodes=episodes)
    numbers, words = as_labels(labels, "labels", "sample_episodes").numbered()
    numbers = numbers.cpu()
    classes, counts = torch.unique(numbers, return_counts=True)
    _check_classes(classes, counts, ways=ways, shots=shots, queries=queries, names=words or class_names)

    generator = torch.Generator().manual_seed(seed)
    picked = _distinct(torch.full((episodes,), len(classes)), ways, generator)  # (episodes, ways)
    of_class = _distinct(counts[picked.flatten()], shots + queries, generator)  # (episodes * ways, images)

    by_class = numbers.argsort(stable=True)  # (items,): the items of the first class, of the second, ...
    starts = counts.cumsum(0) - counts  # (classes,)
    indices = by_class[starts[picked.flatten(), None] + of_class].reshape(episodes, ways, shots + queries)
    return EpisodeList(indices, ways, shots, queries)


def _distinct(sizes: Int[Tensor, "rows"], k: int, generator: torch.Generator) -> Int[Tensor, "rows k"]:
    """For each row, `k` different numbers below its size, every ordered choice equally likely (size >= k).

    Floyd's algorithm (Bentley and Floyd, "A sample of brilliance", CACM 30(9), 1987), all rows at once: time and memory
    do not grow with the sizes. It makes every subset equally likely, but not every order, so rows are shuffled at last.
    """
    chosen = torch.empty(len(sizes), k, dtype=torch.int64)
    for i in range(k):
        top = sizes - k + i
        draw = (torch.rand(len(sizes), generator=generator, dtype=torch.float64) * (top + 1)).long()
        taken = (chosen[:, :i] == draw[:, None]).any(dim=1)
        chosen[:, i] = torch.where(taken, top, draw)
    shuffle = torch.rand(chosen.shape, generator=generator, dtype=torch.float64).argsort(dim=1, stable=True)
    return chosen.gather(1, shuffle)


def check_episode_sizes(**sizes: int) -> None:
    """Refuse a size below one.

    Args:
        **sizes: Numbers by name, as in `check_episode_sizes(ways=5, shots=1)`.

    Raises:
        ValueError: A number is not positive.

    Example:
        >>> check_episode_sizes(ways=5, shots=0)
        Traceback (most recent call last):
        ValueError: shots is 0; an episode needs at least one. Use shots >= 1.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; an episode needs at least one. Use {name} >= 1.")


def check_classes_suffice(
    labels: Any, *, ways: int, shots: int, queries: int, class_names: ClassNames | None = None
) -> None:
    """Refuse a set of which episodes of these sizes cannot be drawn.

    Args:
        labels: (items,), the class of each item.
        ways: Classes in an episode.
        shots: Support images of each class.
        queries: Query images of each class.
        class_names: Names for the error messages, by label.

    Raises:
        ValueError: As `sample_episodes` does.

    Example:
        >>> check_classes_suffice(torch.arange(4) % 2, ways=2, shots=1, queries=2, class_names=("heron", "owl"))
        Traceback (most recent call last):
        ValueError: 2-way 1-shot with 2 queries needs 3 images per class; class 'heron' has 2, the smallest of 2 classes
        that are too small. Use queries <= 1 or drop these classes.
    """
    numbers, words = as_labels(labels, "labels", "check_classes_suffice").numbered()
    classes, counts = torch.unique(numbers.cpu(), return_counts=True)
    _check_classes(classes, counts, ways=ways, shots=shots, queries=queries, names=words or class_names)


def _check_classes(
    classes: Tensor, counts: Tensor, *, ways: int, shots: int, queries: int, names: ClassNames | None
) -> None:
    if len(classes) < ways:
        raise ValueError(
            f"{ways}-way episodes need {ways} classes; the labels hold {len(classes)}. "
            + (f"Use ways <= {len(classes)} or add classes." if len(classes) else "Pass the labels of the data set.")
        )
    needed, too_small = shots + queries, int((counts < shots + queries).sum())
    if too_small:
        smallest = int(counts.argmin())
        size = int(counts[smallest])
        several = f", the smallest of {too_small} classes that are too small" if too_small > 1 else ""
        fewer = f"Use queries <= {size - shots}" if size > shots else "Use fewer shots and queries"
        raise ValueError(
            f"{ways}-way {shots}-shot with {queries} queries needs {needed} images per class; class "
            f"{class_name(int(classes[smallest]), names)} has {size}{several}. "
            f"{fewer} or drop {'these classes' if too_small > 1 else 'the class'}."
        )


def class_name(label: int, names: ClassNames | None) -> str:
    """The name of a class for a message, in quotation marks; its label where it has none."""
    if isinstance(names, Mapping):
        return repr(names[label]) if label in names else str(label)
    return repr(names[label]) if names is not None and 0 <= label < len(names) else str(label)


def split_episode(
    embeddings: Float[Tensor, "rows dim"], labels: Any, *, shots: int
) -> tuple[Float[Tensor, "ways shots dim"], Float[Tensor, "ways queries dim"]]:
    """Cut the embeddings of an episode into support and queries, class by class.

    Rows may come in any order: they are grouped by a stable sort of the labels, and the first `shots` rows of each
    class are its support. Classes come out in the order of their labels (words in alphabetical order), so the target of
    query (w, q) is w.

    Args:
        embeddings: (rows, dim), any floating type; gradients flow through.
        labels: (rows,), any integers or words, each class equally often.
        shots: Support rows of each class.

    Returns:
        support (ways, shots, dim) and query (ways, queries, dim), where ways * (shots + queries) = rows.

    Raises:
        ValueError: Labels are not one integer or word for each row; there is no row; classes have
            different numbers of rows; or no row is left for a query.

    Example:
        >>> embeddings = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
        >>> support, query = split_episode(embeddings, torch.tensor([9, 4, 9, 4]), shots=1)
        >>> support.flatten().tolist(), query.flatten().tolist()  # class 4, then class 9
        ([2.0, 1.0], [4.0, 3.0])
    """
    check_episode_sizes(shots=shots)
    labels, names = as_labels(labels, "labels", "split_episode").numbered()
    if len(labels) != len(embeddings):
        raise ValueError(f"{len(embeddings)} embeddings came with {len(labels)} labels. Pass one label per row.")
    if len(labels) == 0:
        raise ValueError("The episode is empty: 0 embeddings. Pass a batch drawn by an EpisodicBatchSampler.")
    classes, counts = torch.unique(labels, return_counts=True)
    size = int(counts[0])
    if bool((counts != size).any()):
        fewest, most = int(counts.argmin()), int(counts.argmax())
        uneven = [f"class {class_name(int(classes[i]), names)} has {int(counts[i])}" for i in (fewest, most)]
        raise ValueError(
            f"An episode has equally many rows of each class; {' and '.join(uneven)}. Pass a batch drawn by an "
            "EpisodicBatchSampler."
        )
    if size <= shots:
        rows, fewer = (f"{size} rows", f"Use shots <= {size - 1} or draw") if size > 1 else ("1 row", "Draw")
        raise ValueError(
            f"{shots}-shot leaves no query: each of the {len(classes)} classes has {rows}. "
            f"{fewer} more images per class."
        )
    grouped = embeddings[labels.argsort(stable=True).to(embeddings.device)].reshape(len(classes), size, -1)
    # (ways, shots + queries, dim)
    return grouped[:, :shots], grouped[:, shots:]


def split_episodes(
    embeddings: Float[Tensor, "rows dim"], labels: Any, *, shots: int, episodes: int
) -> tuple[Float[Tensor, "episodes ways shots dim"], Float[Tensor, "episodes ways queries dim"]]:
    """Cut a batch of several episodes into support and queries, all at once.

    Args:
        embeddings: (rows, dim), any floating type; gradients flow through. Episode after episode, each of as many rows.
        labels: (rows,), any integers or words; in each episode each class equally often. Episodes may share classes.
        shots: Support rows of each class.
        episodes: How many.

    Returns:
        support (episodes, ways, shots, dim) and query (episodes, ways, queries, dim), each episode as `split_episode` cuts
        it.

    Raises:
        ValueError: When `split_episode` does for one of them (it says for which); or the episodes are not of the same
            sizes.

    Example:
        >>> embeddings = torch.arange(8.0)[:, None]
        >>> labels = torch.tensor([9, 4, 9, 4, 1, 1, 4, 4])
        >>> support, query = split_episodes(embeddings, labels, shots=1, episodes=2)
        >>> support.flatten(1).tolist(), query.flatten(1).tolist()
        ([[1.0, 0.0], [4.0, 6.0]], [[3.0, 2.0], [5.0, 7.0]])
    """
    check_episode_sizes(shots=shots, episodes=episodes)
    rows, read = len(embeddings), as_labels(labels, "labels", "split_episodes")
    labels = read.numbered()[0].to(embeddings.device)
    if rows % episodes or len(labels) != rows:
        raise ValueError(
            f"{rows} embeddings with labels of shape {tuple(labels.shape)} are no batch of {episodes} episodes of the same "
            "size. Pass as many rows for each episode, and one label per row."
        )
    blocks, size_of_one = labels.reshape(episodes, -1), rows // episodes
    first_support, first_query = split_episode(embeddings[:size_of_one], read[:size_of_one], shots=shots)
    if episodes == 1:
        return first_support[None], first_query[None]
    ways, size = len(first_support), shots + first_query.shape[1]
    grouped, order = blocks.sort(dim=1, stable=True)  # (episodes, rows of one)
    classes = grouped.reshape(episodes, ways, size)
    mixed = (classes != classes[:, :, :1]).any(dim=2).any(dim=1) | (classes[:, 1:, 0] == classes[:, :-1, 0]).any(dim=1)
    if bool(mixed.any()):
        number = int(mixed.long().argmax())
        try:
            own = read[number * size_of_one : (number + 1) * size_of_one]
            split_episode(embeddings[:size_of_one], own, shots=shots)
        except ValueError as error:
            raise ValueError(f"Episode {number} of the {episodes} of the batch: {error}") from error
        raise ValueError(
            f"Episode {number} of the {episodes} of the batch has {len(blocks[number].unique())} classes, the first has "
            f"{ways}. Pass episodes of the same sizes, as an EpisodicBatchSampler draws them."
        )
    order = order + torch.arange(0, rows, size_of_one, device=order.device)[:, None]
    of_classes = embeddings[order.flatten()].reshape(episodes, ways, size, -1)
    return of_classes[:, :, :shots], of_classes[:, :, shots:]


@dataclass(frozen=True)
class EpisodeAccuracy:
    """The mean accuracy over a list of episodes, with its spread.

    Attributes:
        mean: In [0, 1].
        std: Sample standard deviation over episodes (divisor n - 1); NaN for one episode.
        ci95: 1.96 * std / sqrt(n), what few-shot papers print after ±: to be held against their tables, and with some
            hundred episodes as good as `interval`; NaN for one episode.
        n: Number of episodes.
        ways: Classes in an episode.
        shots: Support images of each class.
        queries: Query images of each class.
        episodes_hash: `EpisodeList.hash` of the episodes.
        batch_statistics: True where batch normalisation used the statistics of the episode itself; such a number
            looks at all queries together and must not be compared with one that does not.
        per_episode: The accuracy of each episode, float64, for `minus`; None where it was not kept.

    Example:
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
        """The 95 % interval of the mean that also holds it with few episodes or near 1; see `functional.intervals`."""
        if self.per_episode is not None:
            return mean_interval(self.per_episode)
        if self.n < 2:
            return Interval(math.nan, math.nan)
        return share_interval(self.mean, self.std / math.sqrt(self.n), self.n - 1, self.n, 0.95)

    def minus(self, other: "EpisodeAccuracy") -> Difference:
        """How much better this is than another, with its 95 % interval: episode by episode where both had the same list.

        As that of one accuracy, the interval says how far other episodes of the same classes would move the difference.

        Args:
            other: The accuracy of another model.

        Returns:
            The difference of the means; NaN bounds where the lists differ and one has a single episode.

        Raises:
            ValueError: One used batch statistics and the other did not.

        Example:
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
    """The mean of one accuracy per episode, with its 95 % confidence interval.

    `ci95` is the usual one of few-shot papers, mean ± 1.96 std / sqrt(n); `interval` also holds the truth with few
    episodes. Both say how far another list of episodes of the same classes would move the mean, not how far other
    classes would.

    Args:
        accuracies: (episodes,), each in [0, 1], in any order.
        episode_list: The episodes that were measured, all of them.
        batch_statistics: See `EpisodeAccuracy`.

    Returns:
        The summary, computed in float64. One episode gives NaN for `std` and `ci95`.

    Raises:
        ValueError: There is no accuracy, not exactly one per episode, or one that is not a number in [0, 1].

    Example:
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
