"""Scoring of episodes: hits of a batch of logits, accuracies over a fixed list of episodes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fewshot_callbacks.functional._inputs import check_embeddings
from fewshot_callbacks.functional._labels import check_labels
from fewshot_callbacks.functional._tensors import as_tensor
from fewshot_callbacks.functional.episodes import EpisodeAccuracy, EpisodeList, summarize_accuracies
from fewshot_callbacks.protonet.representations import Representation, class_logits

NUMBERS_AT_ONCE = 2**22
"""Embedding components that `evaluate_episodes` scores in one piece: 16 MiB in float32, however many episodes."""


@dataclass(frozen=True)
class EpisodeProtocol:
    """Which episodes an evaluation draws: the numbers that must be equal for two accuracies to be comparable.

    Args:
        ways: classes per episode, at least 2.
        shots: support images per class, at least 1.
        queries: query images per class, at least 1.
        episodes: number of episodes, at least 1; the papers use 600.
        seed: seed of the episode list, at least 0.

    Raises:
        ValueError: if a number is too small.

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
            if getattr(self, name) < least:
                raise ValueError(f"EpisodeProtocol({name}={getattr(self, name)}): use {name} >= {least}.")


torch.serialization.add_safe_globals([EpisodeProtocol])  # checkpoints hold the protocol and load with weights_only=True


def query_hits(
    logits: Float[Tensor, "*episodes query way"], targets: Int[Tensor, "query"]
) -> Float[Tensor, "*episodes query"]:
    """Score each query: 1 if its class has the largest logit, 0 if not, 1/k if k classes tie there.

    Sharing a tie gives a collapsed model, which puts every image on one point, chance accuracy for any order of the
    classes. A row that holds NaN counts as NaN, not as a miss.

    Args:
        logits: larger is closer.
        targets: index of the true class of each query, the same in all episodes.

    Returns:
        One number in [0, 1] per query, or NaN.

    Examples:
        >>> import torch
        >>> query_hits(torch.tensor([[0.0, 1.0], [0.0, 1.0], [2.0, 2.0]]), torch.tensor([1, 0, 0]))
        tensor([1.0000, 0.0000, 0.5000])
    """
    best = logits == logits.amax(dim=-1, keepdim=True)  # (*episodes, query, way); all False in a row with NaN
    hit = best[..., torch.arange(len(targets), device=targets.device), targets]  # (*episodes, query)
    return hit / best.sum(dim=-1)


def evaluate_episodes(
    embeddings: Any,
    labels: Any,
    head: nn.Module,
    episode_list: EpisodeList,
    *,
    representation: Representation = "mean",
    device: torch.device | None = None,
) -> EpisodeAccuracy:
    """Few-shot accuracy of stored embeddings over a list of episodes.

    In evaluation mode the embedding of an image does not depend on the episode that it is in, so embedding each image
    once and drawing the episodes among the embeddings gives what forwarding every episode would.

    Args:
        embeddings: (items, dim), one row per image, finite, any floating dtype.
        labels: (items,), the class of each image, integers or words.
        head: maps (episodes, query, dim) queries and (episodes, point, dim) points to logits (episodes, query, point).
            It is called as it is: put a head that has a training mode of its own into evaluation mode first.
        episode_list: rows of support and query images, from `sample_episodes` on these labels.
        representation: what represents a class: the `mean` of its support, or its support point `nearest` to the query.
        device: where to score; by default where the embeddings are. The head must be there. Only slices of bounded
            size are moved.

    Returns:
        Mean, standard deviation and 95 % interval of the accuracies of the episodes, in [0, 1]. Ties count as in
        `query_hits`.

    Raises:
        ValueError: if embeddings are empty or not finite, labels do not fit them, or the list was drawn for other
            labels: an index out of range, a class of an episode that mixes labels, or a label twice in an episode.

    References:
        Snell, Swersky, Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks.functional.episodes import sample_episodes
        >>> from fewshot_callbacks.protonet import SoftmaxHead
        >>> labels = torch.arange(3).repeat_interleave(4)
        >>> episodes = sample_episodes(labels, ways=3, shots=1, queries=3, episodes=10)
        >>> evaluate_episodes(labels[:, None].float(), labels, SoftmaxHead(), episodes).mean
        1.0
    """
    embeddings = as_tensor(embeddings, "embeddings", "evaluate_episodes")
    check_embeddings(embeddings, "embeddings", "evaluate_episodes")
    labels = check_labels(labels, len(embeddings), "labels", "embeddings", "evaluate_episodes")
    _check_fit(labels, episode_list)
    device = embeddings.device if device is None else device
    rows = episode_list.ways * (episode_list.shots + episode_list.queries)
    piece = max(1, NUMBERS_AT_ONCE // (rows * embeddings.shape[1]))
    targets = torch.arange(episode_list.ways, device=device).repeat_interleave(episode_list.queries)
    accuracies = [torch.empty(0, dtype=torch.float64)]
    with torch.no_grad():
        for start in range(0, len(episode_list), piece):
            indices = episode_list.indices[start : start + piece]  # (piece, ways, shots + queries)
            images = embeddings[indices.to(embeddings.device)].to(device)  # (piece, ways, shots + queries, dim)
            support, query = images[:, :, : episode_list.shots], images[:, :, episode_list.shots :]
            logits = class_logits(head, query.flatten(1, 2), support, representation)  # (piece, ways * queries, ways)
            accuracies.append(query_hits(logits, targets).cpu().double().mean(dim=-1))
    return summarize_accuracies(torch.cat(accuracies), episode_list)


@contextmanager
def batch_norm_of_the_batch(module: nn.Module) -> Iterator[None]:
    """Let every batch norm inside `module` use the statistics of its batch, and leave no trace.

    Inside, the batch norms are in evaluation mode without running statistics: they normalise with the batch, update
    nothing, and do not talk to other processes. All other layers stay as they are. Afterwards, also after an exception,
    each batch norm has its own statistics and mode back, untouched.

    Args:
        module: what holds the batch norms.

    Yields:
        Nothing.

    Examples:
        >>> import torch
        >>> norm = nn.BatchNorm1d(1).eval()
        >>> batch = torch.tensor([[1.0], [3.0]])
        >>> with torch.no_grad(), batch_norm_of_the_batch(norm):
        ...     norm(batch)
        tensor([[-1.0000],
                [ 1.0000]])
        >>> norm.running_mean
        tensor([0.])
    """
    norms = batch_norms(module)
    before = [(norm.running_mean, norm.running_var, norm.training) for norm in norms]
    try:
        for norm in norms:
            norm.running_mean = norm.running_var = None
            norm.training = False
        yield
    finally:
        for norm, (mean, var, training) in zip(norms, before, strict=True):
            norm.running_mean, norm.running_var, norm.training = mean, var, training


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """List all batch norms inside `module`, synchronised ones included."""
    return [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]


def _check_fit(labels: Tensor, episode_list: EpisodeList) -> None:
    if len(episode_list) == 0:
        return
    fix = "Draw the list from the labels that you evaluate: sample_episodes(labels, ...)."
    first, last = int(episode_list.indices.min()), int(episode_list.indices.max())
    if first < 0 or last >= len(labels):
        raise ValueError(f"The episode list names the images {first} to {last}; there are {len(labels)} images. {fix}")
    drawn = labels[episode_list.indices.cpu()]  # (episodes, ways, shots + queries)
    classes = drawn[:, :, 0].sort(dim=1).values  # (episodes, ways)
    foreign = (drawn != drawn[:, :, :1]).flatten(1).any(dim=1) | (classes[:, 1:] == classes[:, :-1]).any(dim=1)
    if foreign.any():
        raise ValueError(
            f"The episode list was drawn for other labels: in {int(foreign.sum())} of its {len(foreign)} episodes a "
            f"class mixes labels or comes twice. {fix}"
        )
