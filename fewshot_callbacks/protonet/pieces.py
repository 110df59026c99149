"""A batch that is embedded piece by piece, and one that is spread over processes: the same gradients as at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics.utilities.distributed import gather_all_tensors

from fewshot_callbacks.distributed.torch_distributed import process_count


def embed_in_pieces(
    embed: Callable[[Tensor], Tensor], images: Shaped[Tensor, "images *shape"], size: int, module: nn.Module
) -> Float[Tensor, "images dim"]:
    """Embed a batch, and keep the graph of one piece at a time.

    Each piece is embedded without a graph; in the backward pass, where the gradient with respect to its embeddings is
    known, it is embedded again with one. Both times the random state of PyTorch and autocast are the same. The second time
    leaves no trace in buffers, such as the running statistics of batch norm.

    Args:
        embed: From images to embeddings.
        images: The batch.
        size: Most images in a piece, 1 or more.
        module: Whose buffers `embed` may change.

    Returns:
        The embeddings, with a gradient if gradients are on.

    References:
        Revaud, Almazan, Rezende, de Souza, "Learning with Average Precision: Training Image Retrieval with a Listwise
        Loss", ICCV 2019; Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016.

    Examples:
        >>> layer = nn.Linear(3, 2)
        >>> images = torch.randn(5, 3)
        >>> embed_in_pieces(layer, images, 2, layer).sum().backward()
        >>> torch.allclose(layer.weight.grad[0], images.sum(dim=0))
        True
    """
    # of nearly one size: batch norm cannot have a last one of one image
    parts = images.tensor_split(-(-len(images) // size))
    if not torch.is_grad_enabled():
        return torch.cat([embed(part) for part in parts])

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _buffers_left_alone(module)

    return torch.cat([checkpoint(embed, part, use_reentrant=False, context_fn=contexts) for part in parts])


@contextmanager
def _buffers_left_alone(module: nn.Module) -> Iterator[None]:
    """Inside, the module works on copies of its buffers."""
    kept = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    try:
        for buffers, originals in kept:
            buffers.update({name: None if one is None else one.clone() for name, one in originals.items()})
        yield
    finally:
        for buffers, originals in kept:
            buffers.update(originals)


def of_all_processes(mine: Shaped[Tensor, "items *rest"]) -> Shaped[Tensor, "all_items *rest"]:
    """Gather the rows of all processes, by rank, with a gradient; their number may differ between processes.

    The gradient of a row is the sum of what all processes make of it. After the mean over processes that
    DistributedDataParallel takes of the weights' gradients, these are those of the mean of the processes' losses, and
    where all make the same loss of the same rows, those of this loss in one process.

    Args:
        mine: The rows of this process.

    Returns:
        All rows; those of this process alone where there is no other.

    Examples:
        >>> of_all_processes(torch.tensor([[1.0], [2.0]])).tolist()
        [[1.0], [2.0]]
    """
    if process_count() == 1:
        return mine
    joined: Tensor = _Gathered.apply(mine)
    return joined


class _Gathered(torch.autograd.Function):
    """`torch.distributed.nn.functional.all_gather` wants equally many rows of all."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        parts = gather_all_tensors(mine.detach())
        rank = torch.distributed.get_rank()
        before = sum(len(part) for part in parts[:rank])
        ctx.rows = slice(before, before + len(mine))
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        # A contiguous copy: the sum is written into it, and others may read the gradient.
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total)
        return total[ctx.rows]
