"""Episodes: small classification problems, sampled from a labelled set.

An episode is `ways` classes with `shots` support images and `queries` query images each (Vinyals et al., "Matching
networks for one shot learning", NeurIPS 2016). All functions here only depend on the labels and a seed, not on a data
set, the global random state or processes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import as_labels, on_cpu
from fewshot_callbacks.functional._reading import check_seed, default_mode
from fewshot_callbacks.system.words import counted


@dataclass(frozen=True)
class EpisodeProtocol:
    """Sizes, number and seed of evaluation episodes. Two accuracies are comparable if their protocols are equal.

    Args:
        ways: Number of classes per episode, at least 2.
        shots: Number of support images per class, at least 1.
        queries: Number of query images per class, at least 1.
        episodes: Number of episodes, at least 1. Papers use 600.
        seed: Seed of the episode list, at least 0.

    Raises:
        ValueError: If a number is too small.

    Examples:
        >>> EpisodeProtocol(ways=20).ways
        20
    """

    ways: int = 5
    shots: int = 1
    queries: int = 15
    episodes: int = 600
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"ways": 2, "shots": 1, "queries": 1, "episodes": 1, "seed": 0}.items():
            value = getattr(self, name)
            if value < least:
                raise InputError(f"EpisodeProtocol({name}={value}): {name} is too small. Use {name} >= {least}.")


ClassNames = Sequence[str] | Mapping[int, str]


@dataclass(frozen=True, eq=False)
class EpisodeList:
    """A list of episodes, as positions in the data set.

    Attributes:
        indices: (episodes, ways, shots + queries) int64 on the CPU. Each row is one class: the first `shots` positions are
            the support, and the rest are the queries. No position is repeated within an episode.
        ways: Number of classes per episode.
        shots: Number of support images per class.
        queries: Number of query images per class.
        classes: (episodes, ways) classes, numbered in the order of their labels; None if they are not known.

    Raises:
        ValueError: If the shape of `indices` does not fit `ways` and `shots + queries`.

    Examples:
        >>> episodes = sample_episodes(torch.arange(40) % 4, ways=2, shots=1, queries=2, episodes=3)
        >>> len(episodes), tuple(episodes[0].shape)
        (3, (2, 3))
    """

    indices: Int[Tensor, "episodes ways images"]
    ways: int
    shots: int
    queries: int
    classes: Int[Tensor, "episodes ways"] | None = None

    def __post_init__(self) -> None:
        sizes = tuple(self.indices.shape[1:])
        expected = (self.ways, self.shots + self.queries)
        if sizes != expected:
            raise InputError(
                f"EpisodeList: indices have {sizes} classes and images per episode, but {self.ways}-way "
                f"{self.shots}-shot with {counted(self.queries, 'query')} needs {expected}. Pass indices of shape "
                "(episodes, ways, shots + queries)."
            )

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, episode: int) -> Int[Tensor, "ways images"]:
        return self.indices[episode]

    def first(self, n: int) -> "EpisodeList":
        """Return the first `n` episodes (all if there are fewer), as a list with its own hash.

        Raises:
            ValueError: If `n` is negative.

        Examples:
            >>> len(sample_episodes(torch.arange(40) % 4, ways=2, queries=2, episodes=9).first(5))
            5
        """
        if n < 0:
            raise InputError(f"first({n}): the number of episodes is negative. Use n >= 0.")
        classes = None if self.classes is None else self.classes[:n]
        return EpisodeList(self.indices[:n], self.ways, self.shots, self.queries, classes)

    @cached_property
    def hash(self) -> str:
        """Twelve hexadecimal characters that identify the list. Two runs with the same episodes have the same hash.

        It is the beginning of the SHA-256 of the sizes (episodes, ways, shots, queries) and the positions, as little-endian
        int64, so it is the same on every machine.

        Examples:
            >>> labels = torch.arange(40) % 4
            >>> one, same = (sample_episodes(labels, ways=2, queries=2, episodes=9, seed=1) for _ in range(2))
            >>> one.hash == same.hash, one.hash == one.first(8).hash
            (True, False)
        """
        sizes = torch.tensor([len(self), self.ways, self.shots, self.queries], device="cpu")
        digest = hashlib.sha256()
        for numbers in (sizes, self.indices):
            digest.update(numbers.cpu().contiguous().numpy().astype("<i8").tobytes())
        return digest.hexdigest()[:12]


@default_mode()
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
    """Return random episodes: each draws classes without replacement, and then images of each class.

    Every class is equally likely, however many images it has, and episodes are independent of each other. The result only
    depends on the arguments. It does not depend on the global random state, which does not change, nor on the number of
    workers, threads or ranks.

    Args:
        labels: (items,) class of each item, integers or strings, in any order, as a tensor, array or list.
        ways: Number of classes per episode.
        shots: Number of support images per class.
        queries: Number of query images per class.
        episodes: Number of episodes.
        seed: Any integer that `torch.Generator.manual_seed` accepts.
        class_names: Names for error messages: a sequence for labels 0, 1, 2, ..., or a mapping from labels. String labels
            are their own names.

    Returns:
        The episodes, as an `EpisodeList`.

    Raises:
        ValueError: If labels are not one integer or string per item, a number is not a positive whole number, there are
            fewer than `ways` classes, or a class has fewer than `shots + queries` images. No class is skipped silently.

    Examples:
        >>> labels = torch.tensor([7, 7, 7, -1, -1, -1])
        >>> episode = sample_episodes(labels, ways=2, shots=1, queries=2, episodes=1)[0]
        >>> sorted(episode.flatten().tolist())
        [0, 1, 2, 3, 4, 5]
        >>> [labels[row].unique().numel() for row in episode]  # a row is one class
        [1, 1]
        >>> sample_episodes(labels, ways=2, shots=1, queries=3, class_names={7: "heron", -1: "owl"})
        Traceback (most recent call last):
        fewshot_callbacks.errors.InputError: 2-way 1-shot with 3 queries needs 4 images per class;
        class 'owl' has 3, the smallest of 2 classes
        that are too small. Use queries <= 2 or drop these classes.
    """
    check_episode_sizes(ways=ways, shots=shots, queries=queries, episodes=episodes)
    numbers, words = as_labels(labels, "labels", "sample_episodes").encoded()
    numbers = numbers.cpu()
    check_classes_suffice(numbers, ways=ways, shots=shots, queries=queries, class_names=words or class_names)
    counts = numbers.unique(return_counts=True)[1]

    generator = torch.Generator().manual_seed(check_seed("sample_episodes", "seed", seed))
    classes = _distinct(torch.full((episodes,), len(counts)), ways, generator)  # (episodes, ways)
    images = _distinct(counts[classes.flatten()], shots + queries, generator)  # (episodes * ways, images)

    by_class = numbers.argsort(stable=True)  # (items,): items of the first class, of the second class, ...
    starts = counts.cumsum(0) - counts  # (classes,)
    indices = by_class[starts[classes.flatten(), None] + images].reshape(episodes, ways, shots + queries)
    return EpisodeList(indices, ways, shots, queries, classes)


def _distinct(sizes: Int[Tensor, "rows"], k: int, generator: torch.Generator) -> Int[Tensor, "rows k"]:
    """Return `k` different random numbers below the size of each row (size >= k); every ordered choice is equally likely.

    It is Floyd's algorithm (Bentley and Floyd, "A sample of brilliance", CACM 30(9), 1987) for all rows at the same time.
    Time and memory do not grow with the sizes. The algorithm makes every subset equally likely, but not every order, so rows
    are shuffled.
    """
    numbers = torch.empty(len(sizes), k, dtype=torch.int64)
    for i in range(k):
        top = sizes - k + i
        draw = (torch.rand(len(sizes), generator=generator, dtype=torch.float64) * (top + 1)).long()
        is_drawn = (numbers[:, :i] == draw[:, None]).any(dim=1)
        numbers[:, i] = torch.where(is_drawn, top, draw)
    shuffled = torch.rand(numbers.shape, generator=generator, dtype=torch.float64).argsort(dim=1, stable=True)
    return numbers.gather(1, shuffled)


def check_episode_sizes(**sizes: int) -> None:
    """Refuse a size that is not a positive whole number.

    Examples:
        >>> check_episode_sizes(ways=5, shots=0)
        Traceback (most recent call last):
        fewshot_callbacks.errors.InputError: shots is 0; an episode needs at least one. Use shots >= 1.
    """
    for name, size in sizes.items():
        if not hasattr(size, "__index__") or isinstance(size, bool):
            raise InputError(f"{name} is {size!r}, which is not a whole number. Use {name} >= 1.")
        if size < 1:
            raise InputError(f"{name} is {size}; an episode needs at least one. Use {name} >= 1.")


def check_classes_suffice(
    labels: Any, *, ways: int, shots: int, queries: int, class_names: ClassNames | None = None, prefix: str = ""
) -> None:
    """Refuse a set that is too small for episodes of these sizes.

    `shots` and `queries` are per class. `prefix` precedes the names of sizes in messages, such as `--data.test_`.

    Examples:
        >>> check_classes_suffice(torch.arange(4) % 2, ways=2, shots=1, queries=2, class_names=("heron", "owl"))
        Traceback (most recent call last):
        fewshot_callbacks.errors.InputError: 2-way 1-shot with 2 queries needs 3 images per class;
        class 'heron' has 2, the smallest of 2 classes
        that are too small. Use queries <= 1 or drop these classes.
    """
    numbers, words = as_labels(labels, "labels", "check_classes_suffice").encoded()
    classes, counts = torch.unique(numbers.cpu(), return_counts=True)
    if len(classes) < ways:
        fix = (
            f"Use {prefix}ways <= {len(classes)} or add classes."
            if len(classes)
            else "Pass the labels of the data set."
        )
        raise InputError(f"{ways}-way episodes need {ways} classes, but the labels have {len(classes)}. {fix}")
    items_per_class = shots + queries
    too_small = int((counts < shots + queries).sum())
    if too_small:
        smallest = int(counts.argmin())
        size = int(counts[smallest])
        several = f", the smallest of {too_small} classes that are too small" if too_small > 1 else ""
        fewer = f"Use {prefix}queries <= {size - shots} or drop"
        if size <= shots:
            fewer = f"Use {prefix}shots 1 with {prefix}queries <= {size - 1} or drop" if size > 1 else "Drop"
        raise InputError(
            f"{ways}-way {shots}-shot with {counted(queries, 'query')} needs {counted(items_per_class, 'image')} per "
            f"class; class {class_name(int(classes[smallest]), words or class_names)} has {size}{several}. {fewer} "
            f"{'these classes' if too_small > 1 else 'the class'}."
        )


def class_name(label: int, names: ClassNames | None) -> str:
    """Return the text for a class in messages: its quoted name, or its label if it has no name."""
    if isinstance(names, Mapping):
        return repr(names[label]) if label in names else str(label)
    return repr(names[label]) if names is not None and 0 <= label < len(names) else str(label)


def split_episode(
    embeddings: Float[Tensor, "rows dim"], labels: Any, *, shots: int
) -> tuple[Float[Tensor, "ways shots dim"], Float[Tensor, "ways queries dim"]]:
    """Return the support and the queries of an episode, class by class.

    Rows may be in any order. They are grouped by a stable sort of the labels, and the first `shots` rows of each class are
    its support. The classes of the result are in the order of their labels (strings in alphabetical order), so the target
    of query (w, q) is w.

    Args:
        embeddings: (rows, dim), any floating type. Gradients flow through.
        labels: (rows,) integers or strings, with equally many rows per class.
        shots: Number of support rows per class.

    Returns:
        Support (ways, shots, dim) and query (ways, queries, dim), where ways * (shots + queries) = rows.

    Raises:
        ValueError: If labels are not one integer or string per row, there are no rows, classes have different numbers of
            rows, or no row remains for a query.

    Examples:
        >>> embeddings = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
        >>> support, query = split_episode(embeddings, torch.tensor([9, 4, 9, 4]), shots=1)
        >>> support.flatten().tolist(), query.flatten().tolist()  # class 4, then class 9
        ([2.0, 1.0], [4.0, 3.0])
    """
    check_episode_sizes(shots=shots)
    labels, names = as_labels(labels, "labels", "split_episode").encoded()
    if len(labels) != len(embeddings):
        raise InputError(
            f"There are {counted(len(embeddings), 'embedding')} but {counted(len(labels), 'label')}. Pass one label per row."
        )
    if len(labels) == 0:
        raise InputError(
            "The episode is empty: it has 0 embeddings. Pass a batch that an EpisodicBatchSampler has drawn."
        )
    classes, counts = torch.unique(labels, return_counts=True)
    size = int(counts[0])
    if bool((counts != size).any()):
        smallest = int(counts.argmin())
        largest = int(counts.argmax())
        uneven = [f"class {class_name(int(classes[i]), names)} has {int(counts[i])}" for i in (smallest, largest)]
        raise InputError(
            f"An episode needs equally many rows per class, but {' and '.join(uneven)}. Pass a batch that an "
            "EpisodicBatchSampler has drawn."
        )
    if size <= shots:
        rows, fewer = (f"{size} rows", f"Use shots <= {size - 1} or draw") if size > 1 else ("1 row", "Draw")
        raise InputError(
            f"{shots}-shot leaves no row for a query, because each of the {len(classes)} classes has {rows}. "
            f"{fewer} more images per class."
        )
    grouped = embeddings[labels.argsort(stable=True).to(embeddings.device)].reshape(len(classes), size, -1)
    # (ways, shots + queries, dim)
    return grouped[:, :shots], grouped[:, shots:]


def split_episodes(
    embeddings: Float[Tensor, "rows dim"], labels: Any, *, shots: int, episodes: int
) -> tuple[Float[Tensor, "episodes ways shots dim"], Float[Tensor, "episodes ways queries dim"]]:
    """Return the support and the queries of all episodes of a batch.

    Args:
        embeddings: (rows, dim), any floating type. Gradients flow through. The episodes are consecutive and have equally
            many rows.
        labels: (rows,) integers or strings, with equally many rows per class in each episode. Episodes may share classes.
        shots: Number of support rows per class.
        episodes: Number of episodes in the batch, at least 1.

    Returns:
        Support (episodes, ways, shots, dim) and query (episodes, ways, queries, dim), each episode as `split_episode`
        returns it.

    Raises:
        ValueError: As in `split_episode`, with the number of the episode. Also if the episodes differ in size.

    Examples:
        >>> embeddings = torch.arange(8.0)[:, None]
        >>> labels = torch.tensor([9, 4, 9, 4, 1, 1, 4, 4])
        >>> support, query = split_episodes(embeddings, labels, shots=1, episodes=2)
        >>> support.flatten(1).tolist(), query.flatten(1).tolist()
        ([[1.0, 0.0], [4.0, 6.0]], [[3.0, 2.0], [5.0, 7.0]])
    """
    check_episode_sizes(shots=shots, episodes=episodes)
    rows = len(embeddings)
    item_labels = as_labels(labels, "labels", "split_episodes")
    if rows % episodes or len(item_labels) != rows:
        raise InputError(
            f"{counted(rows, 'embedding')} with labels of shape {(len(item_labels),)} do not form "
            f"{counted(episodes, 'episode')} of the same size. Pass equally many rows per episode, and one label per "
            "row."
        )
    item_labels = on_cpu(item_labels)  # waits for an accelerator once, not in each episode
    size = rows // episodes
    support = []
    queries = []
    for number in range(episodes):
        episode = slice(number * size, (number + 1) * size)
        try:
            support_of_episode, queries_of_episode = split_episode(
                embeddings[episode], item_labels[episode], shots=shots
            )
        except ValueError as error:
            if number == 0:
                raise
            raise InputError(f"Episode {number} of the {episodes} of the batch: {error}") from error
        support.append(support_of_episode)
        queries.append(queries_of_episode)
        ways = len(support_of_episode)
        first_ways = len(support[0])
        if ways != first_ways:
            raise InputError(
                f"Episode {number} of the {episodes} of the batch has {counted(ways, 'class')}, but the first has "
                f"{first_ways}. Pass episodes of equal size, as an EpisodicBatchSampler draws them."
            )
    return torch.stack(support), torch.stack(queries)
