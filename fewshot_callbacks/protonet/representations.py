"""Representations of a class in an episode: the mean of its support, or each of its support points."""

from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor, nn

from fewshot_callbacks.protonet.heads import DistanceHead, prototypes

Representation = Literal["mean", "nearest"]
"""`"mean"`: the prototype of Snell et al.; `"nearest"`: the support point that is nearest to the query."""


def class_logits(
    head: nn.Module,
    query: Float[Tensor, "*episodes query dim"],
    support: Float[Tensor, "*episodes way shot dim"],
    representation: Representation = "mean",
) -> Float[Tensor, "*episodes query way"]:
    """Compute the logits of each query for each class of its episode, for all episodes at once.

    With `"mean"` a class is the mean of its support, the best point for the softmax head (it maximises the likelihood
    of Gaussians). With `"nearest"` the distance to a class is that to its nearest support point, `d_c = min_i d(query,
    support_i)`, so its logit is the largest of its points: a differentiable nearest-neighbour classifier. For the
    distance-ratio head with more than one shot, the mean is not the most likely point (appendix A.2 of the paper), but
    the support points are. With one shot both are the same.

    Args:
        head: Maps (..., query, dim) queries and (..., point, dim) points to logits (..., query, point), larger is
            closer; each logit depends only on its own query and point.
        query: Query embeddings.
        support: Support embeddings of the same episodes.
        representation: See above.

    Returns:
        Logits, larger is closer.

    Raises:
        ValueError: If there is no such representation, or no shot.

    References:
        Snell, Swersky, Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017.
        Kim, Parviainen, Malde, "Distance-Ratio-Based Formulation for Metric Learning", appendix D.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks.protonet import SoftmaxHead
        >>> support = torch.tensor([[[0.0], [4.0]], [[1.0], [9.0]]])  # means 2 and 5
        >>> class_logits(SoftmaxHead(), torch.tensor([[1.0]]), support)
        tensor([[ -1., -16.]])
        >>> class_logits(SoftmaxHead(), torch.tensor([[1.0]]), support, "nearest")
        tensor([[-1., -0.]])
    """
    check_representation(representation, "class_logits")
    if representation == "mean" or support.shape[-2] <= 1:  # `prototypes` refuses 0 shots in words
        return _scored(head, query, prototypes(support, on_sphere=isinstance(head, DistanceHead) and head.on_sphere))
    ways, shots = support.shape[-3:-1]
    of_points = _scored(head, query, support.flatten(-3, -2))  # (*episodes, query, way * shot)
    nearest: Tensor = of_points.unflatten(-1, (ways, shots)).amax(dim=-1)  # (*episodes, query, way)
    return nearest


def _scored(head: nn.Module, query: Tensor, points: Tensor) -> Tensor:
    logits: Tensor = head(query, points)
    return logits


def check_representation(representation: str, owner: str) -> None:
    """Refuse a representation that there is not.

    Args:
        representation: Name of a representation.
        owner: Who was given it, for the message.

    Raises:
        ValueError: It is none of `Representation`.
    """
    if representation not in get_args(Representation):
        raise ValueError(
            f"{owner}: there is no representation={representation!r}. Choose 'mean', the prototype of a class, or "
            "'nearest', its support point nearest to the query."
        )
