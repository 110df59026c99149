"""Sampling of episodes: which images make up each small classification problem.

An episode is `ways` classes with `shots` support images and `queries` query images each (Vinyals et al., "Matching
networks for one shot learning", NeurIPS 2016). Everything here is a function of the labels and a seed: no data set, no
global random state, no processes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fewshot_callbacks.functional._inputs import check_seed
from fewshot_callbacks.functional._labels import as_labels
from fewshot_callbacks.functional._torch_mode import default_mode

ClassNames = Sequence[str] | Mapping[int, str]


@dataclass(frozen=True, eq=False)
class EpisodeList:
    """A list of episodes, as positions in the data set.

    Attributes:
        indices: `int64` on the CPU, (episodes, ways, shots + queries); in each row, which is one class, the first `shots`
            positions are the support and the rest the queries. No position occurs twice in an episode.
        ways: Classes in an episode.
        shots: Support images of each class.
        queries: Query images of each class.

    Raises:
        ValueError: The sizes of `indices` are not `ways` and `shots + queries`.

    Examples:
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
        """Make the list of the first `n` episodes (all of them if there are fewer), with its own hash.

        Raises:
            ValueError: `n` is negative.

        Examples:
            >>> len(sample_episodes(torch.arange(40) % 4, ways=2, queries=2, episodes=9).first(5))
            5
        """
        if n < 0:
            raise ValueError(f"first({n}) asks for a negative number of episodes. Use n >= 0.")
        return EpisodeList(self.indices[:n], self.ways, self.shots, self.queries)

    @cached_property
    def hash(self) -> str:
        """Twelve hexadecimal characters that identify the list: equal in two runs that used the same episodes.

        The start of the SHA-256 of the sizes (episodes, ways, shots, queries) and the positions, both as little-endian
        int64; the same on every machine.

        Examples:
            >>> labels = torch.arange(40) % 4
            >>> one, same = (sample_episodes(labels, ways=2, queries=2, episodes=9, seed=1) for _ in range(2))
            >>> one.hash == same.hash, one.hash == one.first(8).hash
            (True, False)
        """
        sizes = torch.tensor([len(self), self.ways, self.shots, self.queries], device="cpu")
        digest = hashlib.sha256()
        for part in (sizes, self.indices):
            digest.update(part.cpu().contiguous().numpy().astype("<i8").tobytes())
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
    """Draw episodes: classes without replacement, then images of each class without replacement, all equally likely.

    Every class is equally likely, regardless of its number of images, and episodes are independent of each other. The
    result depends only on the arguments: not on the global random state, which is left unchanged, nor on the number of
    workers, threads or ranks.

    Args:
        labels: (items,), the class of each item: integers or words, in any order, as a tensor, array or list.
        ways: Classes in an episode.
        shots: Support images of each class.
        queries: Query images of each class.
        episodes: Number of episodes.
        seed: Any integer that `torch.Generator.manual_seed` accepts.
        class_names: Names for the error messages, by label: a sequence for labels 0, 1, 2, ..., or a mapping. Labels
            that are words are their own names.

    Returns:
        The episodes; see `EpisodeList`.

    Raises:
        ValueError: Labels are not one integer or word for each item; a number is not whole or not positive; there
            are fewer than `ways` classes; or a class has fewer than `shots + queries` images. No class is skipped
            silently.

    Examples:
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

    generator = torch.Generator().manual_seed(check_seed("sample_episodes", "seed", seed))
    picked = _distinct(torch.full((episodes,), len(classes)), ways, generator)  # (episodes, ways)
    of_class = _distinct(counts[picked.flatten()], shots + queries, generator)  # (episodes * ways, images)

    by_class = numbers.argsort(stable=True)  # (items,): the items of the first class, of the second, ...
    starts = counts.cumsum(0) - counts  # (classes,)
    indices = by_class[starts[picked.flatten(), None] + of_class].reshape(episodes, ways, shots + queries)
    return EpisodeList(indices, ways, shots, queries)


def _distinct(sizes: Int[Tensor, "rows"], k: int, generator: torch.Generator) -> Int[Tensor, "rows k"]:
    """Draw `k` different numbers below the size of each row, every ordered choice equally likely (size >= k).

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
    """Refuse a size that is no whole number, or below one.

    Args:
        **sizes: Numbers by name, as in `check_episode_sizes(ways=5, shots=1)`.

    Raises:
        ValueError: A number is not whole, or not positive.

    Examples:
        >>> check_episode_sizes(ways=5, shots=0)
        Traceback (most recent call last):
        ValueError: shots is 0; an episode needs at least one. Use shots >= 1.
    """
    for name, size in sizes.items():
        if not hasattr(size, "__index__") or isinstance(size, bool):
            raise ValueError(f"{name} is {size!r}; expected a whole number. Use {name} >= 1.")
        if size < 1:
            raise ValueError(f"{name} is {size}; an episode needs at least one. Use {name} >= 1.")


def check_classes_suffice(
    labels: Any, *, ways: int, shots: int, queries: int, class_names: ClassNames | None = None, prefix: str = ""
) -> None:
    """Refuse a set of which episodes of these sizes cannot be drawn.

    Args:
        labels: (items,), the class of each item.
        ways: Classes in an episode.
        shots: Support images of each class.
        queries: Query images of each class.
        class_names: Names for the error messages, by label.
        prefix: What stands before the names of the three sizes in the advice of a message, such as `--data.test_`.

    Raises:
        ValueError: As `sample_episodes` does.

    Examples:
        >>> check_classes_suffice(torch.arange(4) % 2, ways=2, shots=1, queries=2, class_names=("heron", "owl"))
        Traceback (most recent call last):
        ValueError: 2-way 1-shot with 2 queries needs 3 images per class; class 'heron' has 2, the smallest of 2 classes
        that are too small. Use queries <= 1 or drop these classes.
    """
    numbers, words = as_labels(labels, "labels", "check_classes_suffice").numbered()
    classes, counts = torch.unique(numbers.cpu(), return_counts=True)
    names = words or class_names
    _check_classes(classes, counts, ways=ways, shots=shots, queries=queries, names=names, prefix=prefix)


def _check_classes(
    classes: Tensor, counts: Tensor, *, ways: int, shots: int, queries: int, names: ClassNames | None, prefix: str = ""
) -> None:
    if len(classes) < ways:
        raise ValueError(
            f"{ways}-way episodes need {ways} classes; the labels hold {len(classes)}. "
            + (
                f"Use {prefix}ways <= {len(classes)} or add classes."
                if len(classes)
                else "Pass the labels of the data set."
            )
        )
    needed, too_small = shots + queries, int((counts < shots + queries).sum())
    if too_small:
        smallest = int(counts.argmin())
        size = int(counts[smallest])
        several = f", the smallest of {too_small} classes that are too small" if too_small > 1 else ""
        fewer = f"Use {prefix}queries <= {size - shots} or drop"
        if size <= shots:
            fewer = f"Use {prefix}shots 1 with {prefix}queries <= {size - 1} or drop" if size > 1 else "Drop"
        raise ValueError(
            f"{ways}-way {shots}-shot with {queries} queries needs {needed} images per class; class "
            f"{class_name(int(classes[smallest]), names)} has {size}{several}. "
            f"{fewer} {'these classes' if too_small > 1 else 'the class'}."
        )


def class_name(label: int, names: ClassNames | None) -> str:
    """Name a class in a message: its name in quotation marks, or its label if it has none."""
    if isinstance(names, Mapping):
        return repr(names[label]) if label in names else str(label)
    return repr(names[label]) if names is not None and 0 <= label < len(names) else str(label)
