"""Loaders of the current validation or test, and the order in which samplers deal their samples."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import DistributedSampler, IterableDataset

from fewshot_callbacks.distributed.torch_distributed import gather_objects, process_count
from fewshot_callbacks.trainer.lightning import Trainer


class Replica(NamedTuple):
    """The part of the data that this process sees. Processes of one tensor-parallel group see the same part."""

    number: int
    replicas: int
    """number of parts"""
    is_first: bool
    """whether this is the lowest rank with this part; only its items count"""


def replica_of(trainer: Trainer) -> Replica:
    """Return the part of the data that the Trainer's strategy gives this process. *Collective*."""
    processes = process_count()
    strategy_says = trainer.distributed_sampler_kwargs or {}
    number = int(strategy_says.get("rank", trainer.global_rank))
    replicas = int(strategy_says.get("num_replicas") or processes)
    if processes == 1:
        return Replica(0, 1, is_first=True)
    if replicas == processes:
        return Replica(trainer.global_rank, replicas, is_first=True)
    numbers = gather_objects(number)
    return Replica(number, replicas, is_first=numbers.index(number) == trainer.global_rank)


def evaluation_loaders(trainer: Trainer) -> dict[str, Any]:
    """Return name -> loader of the current validation or test, in the order of `dataloader_idx`.

    Loaders from a dictionary keep their keys. Loaders from a list, or nested ones, are `dataloader_idx_0` and so on. A
    single loader, and a `CombinedLoader` that draws from several at a time, is one stream of batches.
    """
    # In `validate` after `fit`, `Trainer.val_dataloaders` still has the loaders of `fit`.
    loop_of_state: dict[Any, Any] = {"test": trainer.test_loop, "validate": trainer.validate_loop}
    loop = loop_of_state.get(trainer.state.fn, trainer.fit_loop.epoch_loop.val_loop)
    combined = loop._combined_loader
    if combined is None:
        return {}
    if combined._mode != "sequential":
        return {"dataloader_idx_0": combined}
    if isinstance(combined.iterables, dict) and len(combined.iterables) == len(combined.flattened):
        return {str(name): loader for name, loader in combined.iterables.items()}
    return {f"dataloader_idx_{i}": loader for i, loader in enumerate(combined.flattened)}


def unpadded_length(loader: Any, replica: Replica) -> int | None:
    """Return the number of items before a `DistributedSampler` pads them; None without such a sampler."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.num_replicas != replica.replicas:
        return None
    return len(sampler.dataset)  # type: ignore[arg-type]


def unknown_order_reason(loader: Any, batches: int, embeddings: int, replica: Replica) -> str | None:
    """Return why the order of this rank's embeddings is unknown; None if it is the order of its `DistributedSampler`.

    Args:
        loader: The loader.
        batches: Number of its batches that this rank got.
        embeddings: Number of embeddings in these batches.
        replica: This rank's part of the data.
    """
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return "an IterableDataset distributes its items itself"
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return f"the sampler ({type(sampler).__name__}) is not Lightning's DistributedSampler"
    if sampler.num_replicas != replica.replicas:
        return f"there are {replica.replicas} processes, but the sampler is set up for {sampler.num_replicas}"
    samples = sample_count(loader, batches)
    return None if samples == embeddings else f"its steps gave {embeddings} embeddings for {samples} samples"


def sample_count(loader: Any, batches: int) -> int:
    """Return the number of samples in this rank's first `batches` batches; one per batch without a batch size."""
    batch_size = getattr(loader, "batch_size", None)
    samples = batches if batch_size is None else batches * batch_size
    # The last batch may be smaller. The sampler has only the samples of this rank.
    return min(samples, len(loader.sampler))


def move_batch(trainer: Trainer, batch: Any) -> Any:
    """Return a batch on the device and in the precision of the Trainer, for a loader that Lightning does not know."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)
