"""Scoring of episodes: hits in a batch of logits, and accuracies over a fixed list of episodes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import check_labels
from fewshot_callbacks.functional._reading import as_tensor, check_embeddings, default_mode, tensor_code
from fewshot_callbacks.functional.episode_accuracy import EpisodeAccuracy, summarize_accuracies
from fewshot_callbacks.functional.episodes import EpisodeList, EpisodeProtocol, split_episodes
from fewshot_callbacks.protonet.heads import Representation, class_logits
from fewshot_callbacks.system.words import counted, verb, with_article

# Numbers in the embeddings that `evaluate_episodes` scores at once: 16 MiB in float32.
NUMBERS_AT_ONCE = 2**22

# The value of `EpisodeAccuracy.episodes_hash` if the loader has no `EpisodeList` that identifies its episodes.
UNKNOWN_EPISODES = "unknown"

# Checkpoints contain the protocol and are loaded with weights_only=True. Older checkpoints refer to the modules that defined
# it at that time.
_OLD_NAMES = (f"{__name__}.EpisodeProtocol", f"{EpisodeProtocol.__module__}.protocol.EpisodeProtocol")
torch.serialization.add_safe_globals([EpisodeProtocol, *((EpisodeProtocol, name) for name in _OLD_NAMES)])


def query_hits(
    logits: Float[Tensor, "*episodes query way"], targets: Int[Tensor, "query"]
) -> Float[Tensor, "*episodes query"]:
    """Return the score of each query: 1 if its class has the largest logit, 0 if not, 1/k if it ties with k - 1 classes.

    Because ties are shared, a collapsed model has chance accuracy. The score is NaN if a logit is NaN. Larger logits
    are closer. The targets are the same in all episodes.

    Examples:
        >>> import torch
        >>> query_hits(torch.tensor([[0.0, 1.0], [0.0, 1.0], [2.0, 2.0]]), torch.tensor([1, 0, 0]))
        tensor([1.0000, 0.0000, 0.5000])
    """
    best = logits == logits.amax(dim=-1, keepdim=True)  # (*episodes, query, way); all False in a row with NaN
    hit = best[..., torch.arange(len(targets), device=targets.device), targets]  # (*episodes, query)
    return hit / best.sum(dim=-1)


@default_mode()
def evaluate_episodes(
    embeddings: Any,
    labels: Any,
    head: nn.Module,
    episode_list: EpisodeList,
    *,
    representation: Representation = "mean",
    device: torch.device | None = None,
) -> EpisodeAccuracy:
    """Return the few-shot accuracy of embeddings over a list of episodes: mean, standard deviation and 95 % interval.

    In evaluation mode, the embedding of an image does not depend on its episode. You can therefore embed each image once and
    draw the episodes from the embeddings: the result is the same as with a forward pass of every episode. If k classes tie
    for the largest logit, a query counts 1/k.

    Args:
        embeddings: (items, dim), finite, any floating dtype.
        labels: (items,), the class of each item, integers or strings.
        head: Module that maps queries (episodes, query, dim) and points (episodes, point, dim) to logits (episodes, query,
            point). Put a head with a training mode into evaluation mode first.
        episode_list: The episodes, from `sample_episodes` with the same labels.
        representation: `"mean"` represents a class by the mean of its support, `"nearest"` by its support point that is
            nearest to the query.
        device: Device of the computation and of the head; by default the device of the embeddings. Embeddings are moved in
            slices of bounded size.

    Raises:
        ValueError: The embeddings are empty or not finite, the number of labels differs, or the list was drawn for other
            labels: an index is out of range, a class of an episode mixes labels, or an episode has a label twice.

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
    code = tensor_code("embeddings", embeddings)
    embeddings = as_tensor(embeddings, "embeddings", "evaluate_episodes")
    check_embeddings(embeddings, "embeddings", "evaluate_episodes", code)
    labels = check_labels(labels, len(embeddings), "labels", "embeddings", "evaluate_episodes")
    _check_fit(labels, episode_list)
    device = embeddings.device if device is None else device
    shots = episode_list.shots
    images_per_episode = episode_list.ways * (shots + episode_list.queries)
    chunk = max(1, NUMBERS_AT_ONCE // (images_per_episode * embeddings.shape[1]))
    targets = torch.arange(episode_list.ways, device=device).repeat_interleave(episode_list.queries)
    # `cat` needs at least one tensor, also for a list without episodes.
    accuracies = [torch.empty(0, dtype=torch.float64)]
    with torch.no_grad():
        for start in range(0, len(episode_list), chunk):
            indices = episode_list.indices[start : start + chunk]  # (chunk, ways, shots + queries)
            images = embeddings[indices.to(embeddings.device)].to(device)  # (chunk, ways, shots + queries, dim)
            support = images[:, :, :shots]
            query = images[:, :, shots:]
            logits = class_logits(head, query.flatten(1, 2), support, representation)  # (chunk, ways * queries, ways)
            accuracies.append(query_hits(logits, targets).cpu().double().mean(dim=-1))
    return summarize_accuracies(torch.cat(accuracies), episode_list)


def score_batch(
    embeddings: Float[Tensor, "images dim"],
    labels: Tensor,
    head: nn.Module,
    representation: Representation,
    shots: int,
    episodes: int,
    purpose: str,
) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy of the queries in a batch, and the hits (episodes, way, query).

    The batch consists of consecutive episodes. `purpose` is for messages.
    """
    try:
        # (episodes, way, shot, dim) and (episodes, way, query, dim)
        support, query = split_episodes(embeddings, labels, shots=shots, episodes=episodes)
    except ValueError as error:
        expected = "an episode"
        settings = f"shots={shots}"
        if episodes != 1:
            expected = f"{episodes} episodes"
            settings += f" and episodes_per_batch={episodes}"
        raise InputError(
            f"ProtoNet: {with_article(purpose)} batch of {counted(len(labels), 'image')} is not {expected} with "
            f"{counted(shots, 'support image')} per class. {error} Use an EpisodicBatchSampler with {settings} as the "
            "loader's batch_sampler."
        ) from error
    ways, queries = query.shape[1:3]
    logits = class_logits(head, query.flatten(1, 2), support, representation)  # (episodes, way * query, way)
    targets = torch.arange(ways, device=logits.device).repeat_interleave(queries)  # (way * query,)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.repeat(episodes))
    return loss, query_hits(logits.detach(), targets).reshape(episodes, ways, queries)


def episode_accuracy(
    embeddings: Float[Tensor, "images dim"],
    labels: Tensor,
    head: nn.Module,
    representation: Representation,
    protocol: EpisodeProtocol,
) -> Float[Tensor, ""]:
    """Return the accuracy of a batch that is one episode, in float64 on the CPU."""
    _, hits = score_batch(embeddings, labels, head, representation, protocol.shots, 1, "evaluation")
    ways, queries = hits.shape[1:]
    if (ways, queries) != (protocol.ways, protocol.queries):
        raise InputError(
            f"ProtoNet: an evaluation batch has {counted(ways, 'class')} with {protocol.shots} + "
            f"{counted(queries, 'image')}, but the protocol is {protocol.ways}-way {protocol.shots}-shot with "
            f"{counted(protocol.queries, 'query')}. Use the same sizes in ProtoNet(evaluation=...) and in the loader's "
            "episodes."
        )
    return hits.cpu().double().mean()


def summarize_batches(
    accuracies: Float[Tensor, "episodes"], episodes: object, protocol: EpisodeProtocol, *, batch_statistics: bool
) -> EpisodeAccuracy:
    """Return a summary of the accuracies of batches that were one episode each.

    Without an `EpisodeList` in `episodes`, the hash of the episodes is "unknown".
    """
    count = len(accuracies)
    if isinstance(episodes, EpisodeList):
        return summarize_accuracies(accuracies, episodes.first(count), batch_statistics=batch_statistics)
    # The images of these episodes are unknown. Only the sizes of the list are read, so any indices will do.
    images_per_class = protocol.shots + protocol.queries
    indices = torch.arange(count * protocol.ways * images_per_class)
    indices = indices.reshape(count, protocol.ways, images_per_class)
    episodes_of_same_size = EpisodeList(indices, protocol.ways, protocol.shots, protocol.queries)
    result = summarize_accuracies(accuracies, episodes_of_same_size, batch_statistics=batch_statistics)
    return replace(result, episodes_hash=UNKNOWN_EPISODES)


def logged_values(result: EpisodeAccuracy | None) -> dict[str, float]:
    """Return the logged values by name; NaN if nothing could be evaluated."""
    if result is None:
        return dict.fromkeys(("accuracy", "accuracy_std", "accuracy_ci95", "accuracy_ci95_open"), math.nan)
    return {
        "accuracy": result.mean,
        "accuracy_std": result.std,
        "accuracy_ci95": result.ci95,
        "accuracy_ci95_open": result.open_interval.half_width,
    }


@contextmanager
def batch_norm_of_the_batch(module: nn.Module) -> Iterator[None]:
    """Return a context in which every batch norm in `module` normalises with the statistics of its batch.

    The batch norms are in evaluation mode without running statistics: they update nothing, and do not communicate with
    other processes. Afterwards, also after an exception, statistics and modes are restored.

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
    saved = [(norm.running_mean, norm.running_var, norm.training) for norm in norms]
    try:
        for norm in norms:
            norm.running_mean = None
            norm.running_var = None
            norm.training = False
        yield
    finally:
        for norm, (running_mean, running_var, training) in zip(norms, saved, strict=True):
            norm.running_mean = running_mean
            norm.running_var = running_var
            norm.training = training


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """Return all batch norms in `module`, including synchronised batch norms."""
    return [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]


def _check_fit(labels: Tensor, episode_list: EpisodeList) -> None:
    """Raise an error if the list of episodes was drawn for other labels."""
    if len(episode_list) == 0:
        return
    fix = "Draw the list from the same labels: sample_episodes(labels, ...)."
    first = int(episode_list.indices.min())
    last = int(episode_list.indices.max())
    if first < 0 or last >= len(labels):
        raise InputError(
            f"evaluate_episodes: the episode list contains the images {first} to {last}, but there "
            f"{verb(len(labels), 'is', 'are')} {len(labels)}. {fix}"
        )
    drawn = labels[episode_list.indices.cpu()]  # (episodes, ways, shots + queries)
    classes = drawn[:, :, 0].sort(dim=1).values  # (episodes, ways)
    mixes_labels = (drawn != drawn[:, :, :1]).flatten(1).any(dim=1)
    repeats_class = (classes[:, 1:] == classes[:, :-1]).any(dim=1)
    wrong = mixes_labels | repeats_class
    if wrong.any():
        raise InputError(
            f"evaluate_episodes: the episode list was drawn for other labels: in {int(wrong.sum())} of its {len(wrong)} "
            f"episodes a class mixes labels or occurs twice. {fix}"
        )
