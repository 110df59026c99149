"""Samplers of training batches: episodes, and batches of P classes with K items each."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from fewshot_callbacks.data.dataset import FewShotDataset
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import as_labels
from fewshot_callbacks.functional.episodes import (
    ClassNames,
    EpisodeList,
    check_episode_sizes,
    class_name,
    sample_episodes,
)
from fewshot_callbacks.system.words import counted, verb


class SeededBatchSampler(BatchSampler):
    """Base class of samplers whose batches depend only on (seed, epoch) and are drawn in the main process.

    When Lightning re-creates a batch sampler for several processes, it passes a DistributedSampler as the argument
    `sampler`. The rank of this DistributedSampler identifies the process's part of the data: with tensor parallelism,
    several processes share a part. The property `sampler` returns this object, because Lightning calls
    `batch_sampler.sampler.set_epoch` before each epoch.
    """

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        """Return a new sampler that stores its arguments where Lightning looks for them.

        Lightning needs the arguments to re-create a batch sampler for several processes. It stores them itself only if the
        sampler is created in one of its hooks, and fails for other samplers.
        """
        self = super().__new__(cls)
        # `lightning.fabric.utilities.data` uses these names. Lightning replaces the argument `sampler`, and fails if there
        # is no such argument.
        attributes = {
            "args": args,
            "kwargs": {**settings, "sampler": None},
            "default_kwargs": {},
            "arg_names": ("labels",),
        }
        for name, value in attributes.items():
            setattr(self, f"__pl_saved_{name}", value)
        return self

    def __init__(
        self, labels: Any, class_names: ClassNames | None, seed: int, epoch: int, sampler: Any, **sizes: int
    ) -> None:
        is_dealt = isinstance(sampler, DistributedSampler)
        self._part = (sampler.rank, sampler.num_replicas) if is_dealt else None
        numbers, words = as_labels(labels, "labels", type(self).__name__).encoded()
        self.labels = numbers.cpu()
        self.class_names = words or class_names
        self.seed = seed
        self.epoch = epoch
        self.sizes = sizes
        # Some programs read these attributes of a BatchSampler. `batch_size` has no effect, because batches are drawn as a
        # whole; 1 is the smallest allowed number.
        self.batch_size = 1
        self.drop_last = False

    def own_part(self) -> tuple[int, int]:
        """Return the index of this process's part of the data, and the number of parts."""
        return own_rank() if self._part is None else self._part

    def draw(self, seed: int) -> EpisodeList:
        """Return the episodes of a seed; `sizes` contains `ways`, `shots`, `queries` and `episodes`."""
        return sample_episodes(self.labels, **self.sizes, seed=seed, class_names=self.class_names)

    @property
    def sampler(self) -> BatchSampler:  # type: ignore[override]  # the base class has an attribute
        """This object, so that Lightning finds `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch. Without this call, each iteration over the sampler increases the epoch by one.

        Args:
            epoch: Number of the epoch, from 0. Fixed episodes do not depend on it.

        Examples:
            >>> import torch
            >>> sampler = EpisodicBatchSampler(torch.arange(8) % 4, ways=2, shots=1, queries=1, episodes=1)
            >>> [next(iter(sampler)) for _ in range(2)]
            [[1, 5, 3, 7], [1, 5, 2, 6]]
            >>> sampler.set_epoch(0)
            >>> next(iter(sampler))
            [1, 5, 3, 7]
        """
        self.epoch = epoch


class EpisodicBatchSampler(SeededBatchSampler):
    """Batch sampler of few-shot episodes: `ways` classes with `shots` + `queries` images each.

    An episode is ordered by class, and the support images of a class come before its query images. A batch is one episode,
    or `episodes_per_batch` consecutive episodes. An incomplete last batch is left out.

    For training (`fixed=False`), each epoch has a new list of episodes that depends only on (seed, epoch). For evaluation
    (`fixed=True`), every epoch has the same list, `episode_list`; you can log its `hash`. The list is drawn in the main
    process, so it depends neither on the number of workers nor on global random state.

    With several processes (torch.distributed is initialised), all processes draw the same list. Rank r takes the episodes
    r, r + world_size, r + 2 world_size, ... For training, the remainder of the list is left out, so that all ranks take the
    same number of steps. For evaluation with `episodes_per_batch=1`, every episode is used exactly once, so the first ranks
    may have one episode more than the others.

    Lightning calls `set_epoch` before each epoch, so a resumed run draws the episodes of its epoch.

    Args:
        labels: (items,), the class of each item, integers or strings: a tensor, array or list, such as the `targets` of
            torchvision's data sets.
        ways: Classes per episode.
        shots: Support images per class.
        queries: Query images per class.
        episodes: Episodes per epoch, over all processes.
        seed: Seed of the list. Training lists of different seeds are independent.
        fixed: Whether every epoch has the same list.
        episodes_per_batch: Episodes per batch.
        class_names: Class names by label, for error messages. String labels need no names.
        epoch: The first epoch. You need it only for a training sampler that starts in the middle of a run.
        sampler: Set by Lightning to a DistributedSampler; only its rank and its number of replicas are used.

    Raises:
        ValueError: A size is out of range, there are too few classes, a class has too few images (`sample_episodes`), or
            there are too few training episodes for a batch per process.

    Examples:
        >>> import torch
        >>> labels = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
        >>> sampler = EpisodicBatchSampler(labels, ways=2, shots=1, queries=1, episodes=1)
        >>> list(sampler), list(sampler)  # each epoch has new episodes
        ([[1, 5, 3, 7]], [[1, 5, 2, 6]])
        >>> fixed = EpisodicBatchSampler(labels, ways=2, shots=1, queries=1, episodes=1, fixed=True)
        >>> list(fixed), list(fixed)
        ([[6, 2, 7, 3]], [[6, 2, 7, 3]])
    """

    def __init__(
        self,
        labels: Any,
        *,
        ways: int,
        shots: int,
        queries: int,
        episodes: int,
        seed: int = 0,
        fixed: bool = False,
        episodes_per_batch: int = 1,
        class_names: ClassNames | None = None,
        epoch: int = 0,
        sampler: Sampler[int] | Iterable[int] | None = None,
    ) -> None:
        super().__init__(
            labels, class_names, seed, epoch, sampler, ways=ways, shots=shots, queries=queries, episodes=episodes
        )
        check_episode_sizes(episodes=episodes, episodes_per_batch=episodes_per_batch)
        if episodes < episodes_per_batch:
            raise InputError(
                f"{counted(episodes, 'episode')} {verb(episodes, 'does', 'do')} not fill a batch of "
                f"{episodes_per_batch}. Use episodes >= {episodes_per_batch}."
            )
        self.episodes = episodes
        self.episodes_per_batch = episodes_per_batch
        self.fixed = fixed
        self._list = self.draw(seed if fixed else mixed_seed(seed, epoch))  # a wrong setting fails here
        self._list_epoch = epoch

    @property
    def episode_list(self) -> EpisodeList:
        """The episodes of all processes: the fixed list, or the list of the next epoch.

        Examples:
            >>> import torch
            >>> sampler = EpisodicBatchSampler(torch.arange(8) % 4, ways=2, shots=1, queries=1, episodes=1)
            >>> sampler.episode_list[0].tolist()
            [[1, 5], [3, 7]]
        """
        if not self.fixed and self._list_epoch != self.epoch:
            self._list = self.draw(mixed_seed(self.seed, self.epoch))
            self._list_epoch = self.epoch
        return self._list

    @property
    def hash(self) -> str:
        """`EpisodeList.hash` of `episode_list`."""
        return self.episode_list.hash

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, because a DataLoader with workers creates an iterator that it never uses. That iterator must not
        # count as an epoch.
        indices = self.episode_list.indices[self._own_episodes()]  # (episodes of this rank, ways, shots + queries)
        self.epoch += 1
        for batch in range(len(indices) // self.episodes_per_batch):
            start = batch * self.episodes_per_batch
            yield indices[start : start + self.episodes_per_batch].flatten().tolist()

    def __len__(self) -> int:
        return len(range(self.episodes)[self._own_episodes()]) // self.episodes_per_batch

    def _own_episodes(self) -> slice:
        """Return the slice of the list that this process uses."""
        rank, world_size = self.own_part()
        if self.fixed:
            return slice(rank, None, world_size)
        needed = world_size * self.episodes_per_batch
        if self.episodes < needed:
            batch = "one" if self.episodes_per_batch == 1 else f"a batch of {self.episodes_per_batch}"
            raise InputError(
                f"{self.episodes} episodes per epoch are too few: each of the {world_size} processes needs {batch}. Use "
                f"episodes >= {needed}."
            )
        # Every rank needs the same number of episodes: with DDP, a rank with an extra episode would wait for the other
        # ranks' gradients forever.
        return slice(rank, self.episodes // world_size * world_size, world_size)


@dataclass(frozen=True)
class Episodes:
    """Settings of episodic training batches (`EpisodicBatchSampler`).

    Args:
        ways: Classes per episode.
        shots: Support images per class.
        queries: Query images per class.
        episodes: Episodes per epoch, over all processes.
        episodes_per_batch: Episodes per batch. Pass the same number to `ProtoNet`.

    Raises:
        ValueError: A number is not a positive integer.

    Examples:
        >>> Episodes(5, shots=0)
        Traceback (most recent call last):
        fewshot_callbacks.errors.InputError: shots is 0; an episode needs at least one. Use shots >= 1.
    """

    ways: int = 20
    shots: int = 1
    queries: int = 5
    episodes: int = 100
    episodes_per_batch: int = 1

    def __post_init__(self) -> None:
        check_episode_sizes(**asdict(self))

    def make_batch_sampler(self, data: FewShotDataset, seed: int, epoch: int) -> BatchSampler:
        """Return a sampler of training batches, which depend only on the data, the seed and the epoch."""
        return EpisodicBatchSampler(data.labels, **asdict(self), seed=seed, class_names=data.class_names, epoch=epoch)


def own_rank() -> tuple[int, int]:
    """Return this process's rank and the number of processes; 0 and 1 if torch.distributed is not initialised."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def mixed_seed(*numbers: int) -> int:
    """Return a hash of the numbers as a seed, so that consecutive numbers have unrelated seeds."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()[:4], "little")


class ClassBalancedBatchSampler(SeededBatchSampler):
    """Batch sampler of P = `classes_per_batch` classes with K = `items_per_class` items each, ordered by class.

    The classes of a batch are drawn uniformly without replacement, and so are the K items of each class. The batches depend
    only on (seed, epoch). They are drawn in the main process, so they depend neither on the number of workers nor on global
    random state.

    With several processes (torch.distributed is initialised), P and K describe the joint batch of all processes. Rank r
    takes the classes r, r + world_size, ... of each batch, so the joint batches equal the batches of a single process.
    `EmbeddingModule` computes its loss on the joint batch.

    Args:
        labels: (items,), the class of each item, integers or strings: a tensor, array or list, such as the `targets` of
            torchvision's data sets.
        classes_per_batch: P, at least 1.
        items_per_class: K, at least 2: a single item in a class has no relevant item.
        batches: Batches per epoch, at least 1; by default the number of items divided by P * K, rounded down.
        seed: Seed of the batches.
        class_names: Class names by label, for error messages. String labels need no names.
        epoch: The first epoch. You need it only for a sampler that starts in the middle of a run.
        sampler: Set by Lightning to a DistributedSampler; only its rank and its number of replicas are used.

    Raises:
        ValueError: A number is too small, there are fewer than P classes, or a class has fewer than K items. The iteration
            raises this error if P is smaller than the number of processes.

    Examples:
        >>> labels = ["owl", "wren", "owl", "wren", "heron", "heron", "heron", "owl"]
        >>> sampler = ClassBalancedBatchSampler(labels, classes_per_batch=2, items_per_class=2)
        >>> [len(batch) for batch in sampler]
        [4, 4]
        >>> first = next(iter(ClassBalancedBatchSampler(labels, classes_per_batch=3, items_per_class=2)))
        >>> sorted(labels[index] for index in first)
        ['heron', 'heron', 'owl', 'owl', 'wren', 'wren']
    """

    def __init__(
        self,
        labels: Any,
        *,
        classes_per_batch: int,
        items_per_class: int,
        batches: int | None = None,
        seed: int = 0,
        class_names: ClassNames | None = None,
        epoch: int = 0,
        sampler: Sampler[int] | Iterable[int] | None = None,
    ) -> None:
        check_batch_sizes(classes_per_batch=classes_per_batch, items_per_class=items_per_class)
        # An episode with P ways, 1 shot and K - 1 queries has P classes with K items each.
        super().__init__(
            labels, class_names, seed, epoch, sampler, ways=classes_per_batch, shots=1, queries=items_per_class - 1
        )
        check_class_balance(self.labels, classes_per_batch, items_per_class, self.class_names)
        if batches is None:
            batches = max(1, len(self.labels) // (classes_per_batch * items_per_class))
        self.sizes["episodes"] = batches
        check_batch_sizes(batches=self.sizes["episodes"])

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, because a DataLoader with workers creates an iterator that it never uses. That iterator must not
        # count as an epoch.
        rank, world_size = self.own_part()
        if self.sizes["ways"] < world_size:
            raise InputError(
                f"ClassBalancedBatchSampler: a batch of {self.sizes['ways']} classes is too small: each of the "
                f"{world_size} processes needs a class. Use classes_per_batch >= {world_size}."
            )
        drawn = self.draw(mixed_seed(self.seed, self.epoch)).indices  # (batches, classes, items)
        self.epoch += 1
        for batch in drawn:
            # Each process has whole classes, so that each of its items has a relevant item in the same process.
            yield batch[rank::world_size].flatten().tolist()

    def __len__(self) -> int:
        return self.sizes["episodes"]


@dataclass(frozen=True)
class ClassBalanced:
    """Settings of class-balanced training batches (`ClassBalancedBatchSampler`).

    Args:
        classes_per_batch: Classes per batch.
        items_per_class: Images per class in a batch.
        batches: Batches per epoch.

    Raises:
        ValueError: A number is not an integer, or too small.

    Examples:
        >>> ClassBalanced(64, 1)
        Traceback (most recent call last):
        fewshot_callbacks.errors.InputError: items_per_class=1: a single item in a class has no relevant item.
        Use items_per_class >= 2.
    """

    classes_per_batch: int
    items_per_class: int = 4
    batches: int = 100

    def __post_init__(self) -> None:
        check_batch_sizes(**asdict(self))

    def make_batch_sampler(self, data: FewShotDataset, seed: int, epoch: int) -> BatchSampler:
        """Return a sampler of training batches, which depend only on the data, the seed and the epoch."""
        names = data.class_names
        return ClassBalancedBatchSampler(data.labels, **asdict(self), seed=seed, class_names=names, epoch=epoch)


# The smallest value of each size, and the reason.
_SMALLEST = {
    "classes_per_batch": (1, "a batch needs at least one class"),
    "items_per_class": (2, "a single item in a class has no relevant item"),
    "batches": (1, "an epoch needs at least one batch"),
}


def check_batch_sizes(**sizes: Any) -> None:
    """Raise an error if a size is too small or not an integer.

    Args:
        **sizes: `classes_per_batch`, `items_per_class` or `batches`.

    Raises:
        ValueError: A size is too small or not an integer; the message names the first such size.

    Examples:
        >>> check_batch_sizes(items_per_class=1)
        Traceback (most recent call last):
        fewshot_callbacks.errors.InputError: items_per_class=1: a single item in a class has no relevant item.
        Use items_per_class >= 2.
    """
    for name, size in sizes.items():
        smallest, reason = _SMALLEST[name]
        if not hasattr(size, "__index__") or isinstance(size, bool):
            raise InputError(f"{name}={size!r} is not an integer. Use an integer, such as {smallest}.")
        if size < smallest:
            raise InputError(f"{name}={size}: {reason}. Use {name} >= {smallest}.")


def check_class_balance(
    labels: Int[Tensor, "items"],
    classes_per_batch: int,
    items_per_class: int,
    class_names: ClassNames | None = None,
    prefix: str = "",
) -> None:
    """Raise an error if the labels are too few for batches of these sizes.

    `prefix` is put before the two sizes in the fix that the message names, such as `--data.train.`.

    Examples:
        >>> check_class_balance(torch.tensor([0, 0, 0, 1, 1]), 2, 3, ("heron", "owl"))
        Traceback (most recent call last):
        fewshot_callbacks.errors.InputError: items_per_class=3, but class 'owl' has 2 items.
        Use items_per_class <= 2 or drop the class.
    """
    classes, sizes = torch.unique(labels, return_counts=True)
    if len(classes) < classes_per_batch:
        fix = "Pass the labels of the data set."
        if len(classes):
            fix = f"Use {prefix}classes_per_batch <= {len(classes)} or add classes."
        raise InputError(
            f"classes_per_batch={classes_per_batch}, but the labels contain {counted(len(classes), 'class')}. {fix}"
        )
    too_small = int((sizes < items_per_class).sum())
    if not too_small:
        return
    smallest = int(sizes.argmin())
    size = int(sizes[smallest])
    fact = f"class {class_name(int(classes[smallest]), class_names)} has {size} item{'s' if size > 1 else ''}"
    drop = "drop the class"
    if too_small > 1:
        fact += f", the smallest of {too_small} classes that are too small"
        drop = "drop these classes"
    fix = f"Use {prefix}items_per_class <= {size} or {drop}." if size > 1 else f"{drop.capitalize()}."
    raise InputError(f"items_per_class={items_per_class}, but {fact}. {fix}")
