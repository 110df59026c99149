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
    """Base of samplers whose batches are a function of (seed, epoch) alone, drawn in the main process.

    When Lightning re-creates a batch sampler for several processes, it passes a DistributedSampler as the argument
    `sampler`. It tells which part of the data this process has: with tensor parallelism some processes have the same part.
    The property `sampler` is this object, because Lightning calls
    `batch_sampler.sampler.set_epoch` before each epoch.
    """

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        """Save the arguments where Lightning looks for them when it re-creates a batch sampler for several processes.

        Lightning saves them itself if a sampler is made in one of its hooks. A sampler that was made elsewhere would
        otherwise be an error.
        """
        self = super().__new__(cls)
        # `lightning.fabric.utilities.data` uses these names. `sampler` has to be among the arguments: Lightning
        # replaces the argument of that name, and fails without one.
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
        # Every BatchSampler has these attributes, and some programs look for them. Batches are drawn whole and not cut
        # from a list of items, so `batch_size` has no effect; 1 is the smallest allowed number.
        self.batch_size = 1
        self.drop_last = False

    def own_part(self) -> tuple[int, int]:
        """Return the number of this process's part of the data, and the number of parts."""
        return own_rank() if self._part is None else self._part

    def draw(self, seed: int) -> EpisodeList:
        """Return the episodes of a seed, with the `ways`, `shots`, `queries` and `episodes` in `sizes`."""
        return sample_episodes(self.labels, **self.sizes, seed=seed, class_names=self.class_names)

    @property
    def sampler(self) -> BatchSampler:  # type: ignore[override]  # the base class has an attribute
        """This object, so that Lightning finds `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that comes next. Without this call, the epoch increases by one at each iteration.

        Args:
            epoch: From 0. Fixed episodes do not depend on it.

        Examples:
            >>> import torch
            >>> sampler = EpisodicBatchSampler(torch.arange(40) % 4, ways=2, shots=1, queries=2, episodes=3)
            >>> first = list(sampler)
            >>> sampler.set_epoch(0)
            >>> list(sampler) == first
            True
        """
        self.epoch = epoch


class EpisodicBatchSampler(SeededBatchSampler):
    """Batches of `ways` classes with `shots` + `queries` images each, class by class, each class's support first.

    A batch is one episode, or `episodes_per_batch` consecutive episodes; an incomplete last batch is left out.

    While training (`fixed=False`) each epoch has a fresh list of episodes, a function of (seed, epoch). For evaluation
    (`fixed=True`) every epoch has the same list, `episode_list`, whose `hash` can be logged. The list is drawn in the
    main process, so it depends neither on the number of workers nor on global random state.

    With several processes (torch.distributed initialised) all draw the same list, and rank r takes the episodes r, r +
    world_size, r + 2 world_size, ... of it. While training, the remainder of the list is left out, so that all ranks
    take the same number of steps. A fixed list is distributed completely (with `episodes_per_batch=1`), every episode
    exactly once, and the first ranks may get one more (unless the number of episodes is a multiple of the number of
    processes).

    Lightning calls `set_epoch` before each epoch, so that a resumed run continues with the episodes of its epoch.

    Args:
        labels: (items,), the class of each item of the data set, integers or strings: a tensor, array or list, such as the
            `targets` of torchvision's data sets.
        ways: Classes in an episode.
        shots: Support images of each class.
        queries: Query images of each class.
        episodes: Episodes in an epoch, over all processes.
        seed: Seed of the list. Training lists of different seeds are independent.
        fixed: True for the same list at every epoch.
        episodes_per_batch: Episodes in a batch. `episodes` counts episodes, not batches.
        class_names: Names for the error messages, by label; labels that are strings are their own names.
        epoch: The first epoch; only a training sampler that starts in the middle of a run needs it.
        sampler: Lightning puts a DistributedSampler here. Only its rank and its number of replicas are used.

    Raises:
        ValueError: See `fewshot_callbacks.functional.episodes.sample_episodes`; or fewer training episodes than
            processes need for a batch each.

    Examples:
        >>> import torch
        >>> labels = torch.arange(40) % 4
        >>> sampler = EpisodicBatchSampler(labels, ways=2, shots=1, queries=2, episodes=3)
        >>> [len(batch) for batch in sampler]
        [6, 6, 6]
        >>> list(sampler) == list(sampler)  # every epoch is new
        False
        >>> fixed = EpisodicBatchSampler(labels, ways=2, shots=1, queries=2, episodes=3, fixed=True)
        >>> list(fixed) == list(fixed), len(fixed.hash)
        (True, 12)
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
                f"{counted(episodes, 'episode')} {verb(episodes, 'does', 'do')} not make a batch of "
                f"{episodes_per_batch}. Use episodes >= {episodes_per_batch}."
            )
        self.episodes = episodes
        self.episodes_per_batch = episodes_per_batch
        self.fixed = fixed
        self._list = self.draw(seed if fixed else mixed_seed(seed, epoch))  # a wrong setting fails here
        self._list_epoch = epoch

    @property
    def episode_list(self) -> EpisodeList:
        """The whole list, for all processes: the fixed list, or the list of the next epoch.

        Examples:
            >>> import torch
            >>> sampler = EpisodicBatchSampler(torch.arange(40) % 4, ways=2, shots=1, queries=2, episodes=3)
            >>> sampler.episode_list[0].flatten().tolist() == next(iter(sampler))
            True
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
        # This is a generator because a DataLoader with workers makes an iterator that it never uses, which must not
        # count as an epoch.
        indices = self.episode_list.indices[self._own_episodes()]  # (episodes of this rank, ways, shots + queries)
        self.epoch += 1
        for batch in range(len(indices) // self.episodes_per_batch):
            start = batch * self.episodes_per_batch
            yield indices[start : start + self.episodes_per_batch].flatten().tolist()

    def __len__(self) -> int:
        return len(range(self.episodes)[self._own_episodes()]) // self.episodes_per_batch

    def _own_episodes(self) -> slice:
        """Return the episodes of the list that this process takes."""
        rank, world_size = self.own_part()
        if self.fixed:
            return slice(rank, None, world_size)
        needed = world_size * self.episodes_per_batch
        if self.episodes < needed:
            batch = "one" if self.episodes_per_batch == 1 else f"a batch of {self.episodes_per_batch}"
            raise InputError(
                f"{self.episodes} episodes per epoch leave some of the {world_size} processes without {batch}. Use "
                f"episodes >= {needed}."
            )
        # Every rank has the same number of episodes: under DDP a rank with one more would wait for the gradients of the
        # others.
        return slice(rank, self.episodes // world_size * world_size, world_size)


@dataclass(frozen=True)
class Episodes:
    """Train on episodes (`EpisodicBatchSampler`).

    Args:
        ways: Classes in an episode.
        shots: Support images of each class.
        queries: Query images of each class.
        episodes: Episodes in an epoch, over all processes.
        episodes_per_batch: Episodes in a batch; ProtoNet takes the same number.

    Raises:
        ValueError: If a number is not whole, or not positive.

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
        """Return the sampler of training batches, which are a function of the seed and the epoch."""
        return EpisodicBatchSampler(data.labels, **asdict(self), seed=seed, class_names=data.class_names, epoch=epoch)


def own_rank() -> tuple[int, int]:
    """Return the rank of this process and the number of processes; 0 and 1 if nothing is distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def mixed_seed(*numbers: int) -> int:
    """Return a seed that is a hash of numbers: neighbouring numbers have unrelated seeds, which sums would not have."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()[:4], "little")


class ClassBalancedBatchSampler(SeededBatchSampler):
    """Batches of P = `classes_per_batch` classes with K = `items_per_class` items each, class by class.

    Classes of a batch are drawn without replacement, all equally likely, then K items of each without replacement. The
    batches of an epoch are a function of (seed, epoch) alone: drawn in the main process, they depend neither on the number
    of workers nor on global random state.

    With several processes (torch.distributed initialised) P and K describe the joined batch of all processes. Rank r
    takes its classes r, r + world_size, ..., so the joined batches are the batches of a single process.
    `EmbeddingModule` computes its loss on the joined batch.

    Args:
        labels: (items,), the class of each item of the data set, integers or strings: a tensor, array or list, such as the
            `targets` of torchvision's data sets.
        classes_per_batch: P, 1 or more.
        items_per_class: K, 2 or more: an item alone in its class has no relevant item.
        batches: Number of batches in an epoch, at least 1; by default as many as the items of the set fill.
        seed: Seed of the batches.
        class_names: Names for the error messages, by label; labels that are strings are their own names.
        epoch: The first epoch; only a sampler that starts in the middle of a run needs it.
        sampler: Ignored, as in `EpisodicBatchSampler`: Lightning would put a DistributedSampler here.

    Raises:
        ValueError: A number is too small; there are fewer than P classes, or a class has fewer than K items; or, when it is
            iterated, P is smaller than the number of processes.

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
        # An episode of P ways with one support image and K - 1 queries has P classes of K items.
        super().__init__(
            labels, class_names, seed, epoch, sampler, ways=classes_per_batch, shots=1, queries=items_per_class - 1
        )
        check_class_balance(self.labels, classes_per_batch, items_per_class, self.class_names)
        if batches is None:
            batches = max(1, len(self.labels) // (classes_per_batch * items_per_class))
        self.sizes["episodes"] = batches
        check_batch_sizes(batches=self.sizes["episodes"])

    def __iter__(self) -> Iterator[list[int]]:
        # This is a generator because a DataLoader with workers makes an iterator that it never uses, which must not
        # count as an epoch.
        rank, world_size = self.own_part()
        if self.sizes["ways"] < world_size:
            raise InputError(
                f"ClassBalancedBatchSampler: batches of {self.sizes['ways']} classes leave some of the "
                f"{world_size} processes without a class. Use classes_per_batch >= {world_size}."
            )
        drawn = self.draw(mixed_seed(self.seed, self.epoch)).indices  # (batches, classes, items)
        self.epoch += 1
        for batch in drawn:
            # Each process has whole classes, so that its items have relevant items among themselves.
            yield batch[rank::world_size].flatten().tolist()

    def __len__(self) -> int:
        return self.sizes["episodes"]


@dataclass(frozen=True)
class ClassBalanced:
    """Train on batches of some classes with as many images of each (`ClassBalancedBatchSampler`).

    Args:
        classes_per_batch: Classes in a batch.
        items_per_class: Images of each class in a batch.
        batches: Batches in an epoch.

    Raises:
        ValueError: A number is not whole, or too small.

    Examples:
        >>> ClassBalanced(64, 1)
        Traceback (most recent call last):
        fewshot_callbacks.errors.InputError: items_per_class=1: an item alone in its class has no relevant item.
        Use items_per_class >= 2.
    """

    classes_per_batch: int
    items_per_class: int = 4
    batches: int = 100

    def __post_init__(self) -> None:
        check_batch_sizes(**asdict(self))

    def make_batch_sampler(self, data: FewShotDataset, seed: int, epoch: int) -> BatchSampler:
        """Return the sampler of training batches, which are a function of the seed and the epoch."""
        names = data.class_names
        return ClassBalancedBatchSampler(data.labels, **asdict(self), seed=seed, class_names=names, epoch=epoch)


# The smallest value of each size of a batch, and the reason.
_SMALLEST = {
    "classes_per_batch": (1, "a batch needs at least one class"),
    "items_per_class": (2, "an item alone in its class has no relevant item"),
    "batches": (1, "an epoch needs at least one"),
}


def check_batch_sizes(**sizes: Any) -> None:
    """Refuse sizes that are too small, or no whole numbers.

    Args:
        **sizes: `classes_per_batch`, `items_per_class` or `batches`.

    Raises:
        ValueError: Names the first such size.

    Examples:
        >>> check_batch_sizes(items_per_class=1)
        Traceback (most recent call last):
        fewshot_callbacks.errors.InputError: items_per_class=1: an item alone in its class has no relevant item.
        Use items_per_class >= 2.
    """
    for name, size in sizes.items():
        smallest, reason = _SMALLEST[name]
        if not hasattr(size, "__index__") or isinstance(size, bool):
            raise InputError(f"{name}={size!r} must be a whole number, such as {smallest}.")
        if size < smallest:
            raise InputError(f"{name}={size}: {reason}. Use {name} >= {smallest}.")


def check_class_balance(
    labels: Int[Tensor, "items"],
    classes_per_batch: int,
    items_per_class: int,
    class_names: ClassNames | None = None,
    prefix: str = "",
) -> None:
    """Refuse labels from which batches of these sizes cannot be drawn.

    Args:
        labels: The class of each item.
        classes_per_batch: P.
        items_per_class: K.
        class_names: Names for the error messages, by label.
        prefix: A prefix of the names of the two sizes in the advice of a message, such as `--data.`.

    Raises:
        ValueError: If there are too few classes, or a class has too few items.

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
            f"classes_per_batch={classes_per_batch}, but the labels hold {counted(len(classes), 'class')}. {fix}"
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
