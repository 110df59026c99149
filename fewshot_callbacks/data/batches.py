"""Which batches a network is trained on: episodes, or class-balanced batches."""

from dataclasses import asdict, dataclass

from torch.utils.data import BatchSampler

from fewshot_callbacks.data.class_balanced import ClassBalancedBatchSampler, check_batch_sizes, check_class_balance
from fewshot_callbacks.data.dataset import FewShotDataset
from fewshot_callbacks.data.episodes import EpisodicBatchSampler
from fewshot_callbacks.functional.episodes import check_classes_suffice, check_episode_sizes


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
        ValueError: A number is not whole, or not positive.

    Examples:
        >>> Episodes(5, shots=0)
        Traceback (most recent call last):
        ValueError: shots is 0; an episode needs at least one. Use shots >= 1.
    """

    ways: int = 20
    shots: int = 1
    queries: int = 5
    episodes: int = 100
    episodes_per_batch: int = 1

    def __post_init__(self) -> None:
        check_episode_sizes(**asdict(self))

    def sampler(self, data: FewShotDataset, seed: int, epoch: int) -> BatchSampler:
        """Make the batches of a training: a function of the seed and the epoch."""
        return EpisodicBatchSampler(data.labels, **asdict(self), seed=seed, class_names=data.class_names, epoch=epoch)

    def check(self, data: FewShotDataset, prefix: str = "") -> None:
        """Refuse a split whose classes do not suffice; `prefix` stands before the names of settings in the advice."""
        check_classes_suffice(data.labels, **sizes_of(self), class_names=data.class_names, prefix=prefix)


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
        ValueError: items_per_class=1: an item alone in its class has no relevant item. Use items_per_class >= 2.
    """

    classes_per_batch: int
    items_per_class: int = 4
    batches: int = 100

    def __post_init__(self) -> None:
        check_batch_sizes(**asdict(self))

    def sampler(self, data: FewShotDataset, seed: int, epoch: int) -> BatchSampler:
        """Make the batches of a training: a function of the seed and the epoch."""
        names = data.class_names
        return ClassBalancedBatchSampler(data.labels, **asdict(self), seed=seed, class_names=names, epoch=epoch)

    def check(self, data: FewShotDataset, prefix: str = "") -> None:
        """Refuse a split whose classes do not suffice; `prefix` stands before the names of settings in the advice."""
        check_class_balance(data.labels, **sizes_of(self), class_names=data.class_names, prefix=prefix)


def sizes_of(batches: object) -> dict[str, int]:
    """Return the settings that the classes of a split must suffice for, by name."""
    sizes = ("ways", "shots", "queries", "classes_per_batch", "items_per_class")
    return {name: getattr(batches, name) for name in sizes if hasattr(batches, name)}
