"""Split the embeddings of an episode into support and queries."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fewshot_callbacks.functional._labels import as_labels
from fewshot_callbacks.functional.episodes.sampling import check_episode_sizes, class_name


def split_episode(
    embeddings: Float[Tensor, "rows dim"], labels: Any, *, shots: int
) -> tuple[Float[Tensor, "ways shots dim"], Float[Tensor, "ways queries dim"]]:
    """Cut the embeddings of an episode into support and queries, class by class.

    Rows may come in any order: they are grouped by a stable sort of the labels, and the first `shots` rows of each
    class are its support. Classes come out in the order of their labels (words in alphabetical order), so the target of
    query (w, q) is w.

    Args:
        embeddings: (rows, dim), any floating type; gradients flow through.
        labels: (rows,), any integers or words, each class equally often.
        shots: Support rows of each class.

    Returns:
        Support (ways, shots, dim) and query (ways, queries, dim), where ways * (shots + queries) = rows.

    Raises:
        ValueError: Labels are not one integer or word for each row; there is no row; classes have
            different numbers of rows; or no row is left for a query.

    Examples:
        >>> embeddings = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
        >>> support, query = split_episode(embeddings, torch.tensor([9, 4, 9, 4]), shots=1)
        >>> support.flatten().tolist(), query.flatten().tolist()  # class 4, then class 9
        ([2.0, 1.0], [4.0, 3.0])
    """
    check_episode_sizes(shots=shots)
    labels, names = as_labels(labels, "labels", "split_episode").numbered()
    if len(labels) != len(embeddings):
        raise ValueError(f"{len(embeddings)} embeddings came with {len(labels)} labels. Pass one label per row.")
    if len(labels) == 0:
        raise ValueError("The episode is empty: 0 embeddings. Pass a batch drawn by an EpisodicBatchSampler.")
    classes, counts = torch.unique(labels, return_counts=True)
    size = int(counts[0])
    if bool((counts != size).any()):
        fewest, most = int(counts.argmin()), int(counts.argmax())
        uneven = [f"class {class_name(int(classes[i]), names)} has {int(counts[i])}" for i in (fewest, most)]
        raise ValueError(
            f"An episode has equally many rows of each class; {' and '.join(uneven)}. Pass a batch drawn by an "
            "EpisodicBatchSampler."
        )
    if size <= shots:
        rows, fewer = (f"{size} rows", f"Use shots <= {size - 1} or draw") if size > 1 else ("1 row", "Draw")
        raise ValueError(
            f"{shots}-shot leaves no query: each of the {len(classes)} classes has {rows}. "
            f"{fewer} more images per class."
        )
    grouped = embeddings[labels.argsort(stable=True).to(embeddings.device)].reshape(len(classes), size, -1)
    # (ways, shots + queries, dim)
    return grouped[:, :shots], grouped[:, shots:]


def split_episodes(
    embeddings: Float[Tensor, "rows dim"], labels: Any, *, shots: int, episodes: int
) -> tuple[Float[Tensor, "episodes ways shots dim"], Float[Tensor, "episodes ways queries dim"]]:
    """Cut a batch of several episodes into support and queries, all at once.

    Args:
        embeddings: (rows, dim), any floating type; gradients flow through. The episodes follow one another, with the
            same number of rows each.
        labels: (rows,), any integers or words; in each episode each class equally often. Episodes may share classes.
        shots: Support rows of each class.
        episodes: Number of episodes in the batch, at least 1.

    Returns:
        Support (episodes, ways, shots, dim) and query (episodes, ways, queries, dim), each episode as `split_episode` cuts
        it.

    Raises:
        ValueError: As in `split_episode`, with the number of the episode; or if the episodes differ in size.

    Examples:
        >>> embeddings = torch.arange(8.0)[:, None]
        >>> labels = torch.tensor([9, 4, 9, 4, 1, 1, 4, 4])
        >>> support, query = split_episodes(embeddings, labels, shots=1, episodes=2)
        >>> support.flatten(1).tolist(), query.flatten(1).tolist()
        ([[1.0, 0.0], [4.0, 6.0]], [[3.0, 2.0], [5.0, 7.0]])
    """
    check_episode_sizes(shots=shots, episodes=episodes)
    rows, read = len(embeddings), as_labels(labels, "labels", "split_episodes")
    labels = read.numbered()[0].to(embeddings.device)
    if rows % episodes or len(labels) != rows:
        raise ValueError(
            f"{rows} embeddings with labels of shape {tuple(labels.shape)} do not form a batch of {episodes} episodes "
            f"of the same size. Pass as many rows for each episode, and one label per row."
        )
    blocks, size_of_one = labels.reshape(episodes, -1), rows // episodes
    first_support, first_query = split_episode(embeddings[:size_of_one], read[:size_of_one], shots=shots)
    if episodes == 1:
        return first_support[None], first_query[None]
    ways, size = len(first_support), shots + first_query.shape[1]
    grouped, order = blocks.sort(dim=1, stable=True)  # (episodes, rows of one)
    classes = grouped.reshape(episodes, ways, size)
    mixed = (classes != classes[:, :, :1]).any(dim=2).any(dim=1) | (classes[:, 1:, 0] == classes[:, :-1, 0]).any(dim=1)
    if bool(mixed.any()):
        number = int(mixed.long().argmax())
        try:
            own = read[number * size_of_one : (number + 1) * size_of_one]
            split_episode(embeddings[:size_of_one], own, shots=shots)
        except ValueError as error:
            raise ValueError(f"Episode {number} of the {episodes} of the batch: {error}") from error
        raise ValueError(
            f"Episode {number} of the {episodes} of the batch has {len(blocks[number].unique())} classes, the first has "
            f"{ways}. Pass episodes of equal size, as an EpisodicBatchSampler draws them."
        )
    order = order + torch.arange(0, rows, size_of_one, device=order.device)[:, None]
    of_classes = embeddings[order.flatten()].reshape(episodes, ways, size, -1)
    return of_classes[:, :, :shots], of_classes[:, :, shots:]
