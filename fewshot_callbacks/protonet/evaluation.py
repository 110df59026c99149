"""Scoring of episodes: hits of a batch of logits, accuracies over a fixed list of episodes."""

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

# Embedding components that `evaluate_episodes` scores at once: 16 MiB in float32, however many episodes.
NUMBERS_AT_ONCE = 2**22

# The value of `EpisodeAccuracy.episodes_hash` if the loader of the episodes has no `EpisodeList` to identify them.
UNKNOWN_EPISODES = "unknown"

# Checkpoints contain the protocol and are loaded with weights_only=True. Older checkpoints name the modules in which it
# was defined then.
_OLD_NAMES = (f"{__name__}.EpisodeProtocol", f"{EpisodeProtocol.__module__}.protocol.EpisodeProtocol")
torch.serialization.add_safe_globals([EpisodeProtocol, *((EpisodeProtocol, name) for name in _OLD_NAMES)])


def query_hits(
    logits: Float[Tensor, "*episodes query way"], targets: Int[Tensor, "query"]
) -> Float[Tensor, "*episodes query"]:
    """Score each query: 1 if its class has the largest logit, 0 if not, 1/k if k classes tie there.

    Sharing a tie gives a collapsed model, which puts every image on one point, chance accuracy for any order of the
    classes. A row with a NaN counts as NaN, not as a miss.

    Args:
        logits: Larger is closer.
        targets: Index of the true class of each query, the same in all episodes.

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
    """Compute the few-shot accuracy of stored embeddings over a list of episodes.

    In evaluation mode the embedding of an image does not depend on its episode. Embedding each image once and drawing the
    episodes among the embeddings therefore gives the same result as a forward pass of every episode.

    Args:
        embeddings: (items, dim), one row per image, finite, any floating dtype.
        labels: (items,), the class of each image, integers or strings.
        head: Maps (episodes, query, dim) queries and (episodes, point, dim) points to logits (episodes, query, point).
            Its mode is not changed: put a head with a training mode into evaluation mode first.
        episode_list: Rows of support and query images, from `sample_episodes` on these labels.
        representation: What represents a class: the `mean` of its support, or its support point `nearest` to the query.
        device: Where to score; by default where the embeddings are. The head must be there. Only slices of bounded
            size are moved.

    Returns:
        Mean, standard deviation and 95 % interval of the accuracies of the episodes, in [0, 1]. Ties count as in
        `query_hits`.

    Raises:
        ValueError: If embeddings are empty or not finite, labels do not fit them, or the list was drawn for other
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
    # The empty tensor is for a list without episodes, since `cat` needs at least one tensor.
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
    """Score the episodes of a batch.

    Args:
        embeddings: Embeddings of the images; in training they have a gradient.
        labels: (images,) class of each image.
        head: See `evaluate_episodes`.
        representation: See `evaluate_episodes`.
        shots: Support images per class.
        episodes: Number of consecutive episodes in the batch.
        purpose: Purpose of the batch, for messages.

    Returns:
        Mean cross-entropy of the queries, and hits (episodes, way, query).

    Raises:
        ValueError: If the batch does not form these episodes.
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
            f"ProtoNet: {with_article(purpose)} batch of {counted(len(labels), 'image')} is not {expected} of "
            f"{counted(shots, 'support image')} per class. {error} An EpisodicBatchSampler with {settings} as the "
            "loader's batch_sampler draws episodes."
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
    """Compute the accuracy of a batch that is one episode, in float64 on the CPU.

    Raises:
        ValueError: If it is not an episode, or its sizes differ from the protocol's.
    """
    _, hits = score_batch(embeddings, labels, head, representation, protocol.shots, 1, "evaluation")
    ways, queries = hits.shape[1:]
    if (ways, queries) != (protocol.ways, protocol.queries):
        raise InputError(
            f"ProtoNet: an evaluation batch holds {counted(ways, 'class')} with {protocol.shots} + "
            f"{counted(queries, 'image')}; the protocol is {protocol.ways}-way {protocol.shots}-shot with "
            f"{counted(protocol.queries, 'query')}. Give ProtoNet's evaluation and the episodes of the loader the same "
            "sizes."
        )
    return hits.cpu().double().mean()


def summarize_batches(
    accuracies: Float[Tensor, "episodes"], episodes: object, protocol: EpisodeProtocol, *, batch_statistics: bool
) -> EpisodeAccuracy:
    """Summarise the accuracies of batches that were one episode each.

    Args:
        accuracies: Accuracy of each episode, in the order of the list.
        episodes: The `EpisodeList` of the loader, if it has one.
        protocol: Sizes of the episodes.
        batch_statistics: Whether batch norm used the statistics of the episode.

    Returns:
        The summary, with the hash of the list, or "unknown" without a list.
    """
    count = len(accuracies)
    if isinstance(episodes, EpisodeList):
        return summarize_accuracies(accuracies, episodes.first(count), batch_statistics=batch_statistics)
    # The images of these episodes are unknown. Any indices will do, since only the sizes of the list are read.
    images_per_class = protocol.shots + protocol.queries
    indices = torch.arange(count * protocol.ways * images_per_class)
    indices = indices.reshape(count, protocol.ways, images_per_class)
    episodes_of_same_size = EpisodeList(indices, protocol.ways, protocol.shots, protocol.queries)
    result = summarize_accuracies(accuracies, episodes_of_same_size, batch_statistics=batch_statistics)
    return replace(result, episodes_hash=UNKNOWN_EPISODES)


def logged_values(result: EpisodeAccuracy | None) -> dict[str, float]:
    """Return the values of a result by the names that are logged; NaN if nothing could be evaluated."""
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
    """Let every batch norm inside `module` use the statistics of its batch, and leave no trace.

    Inside, the batch norms are in evaluation mode without running statistics: they normalise with the batch, update
    nothing, and do not talk to other processes. All other layers stay as they are. Afterwards, also after an exception,
    each batch norm has its own statistics and mode back, untouched.

    Args:
        module: The network with the batch norms.

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
    """List all batch norms inside `module`, synchronised ones included."""
    return [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]


def _check_fit(labels: Tensor, episode_list: EpisodeList) -> None:
    """Refuse a list of episodes that was drawn for other labels."""
    if len(episode_list) == 0:
        return
    fix = "Draw the list from the labels that you evaluate: sample_episodes(labels, ...)."
    first = int(episode_list.indices.min())
    last = int(episode_list.indices.max())
    if first < 0 or last >= len(labels):
        raise InputError(
            f"evaluate_episodes: the episode list names the images {first} to {last}; there "
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
