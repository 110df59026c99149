"""Heads: from the distances between queries and prototypes to the logits of the classes."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

EPSILON = 1e-10
"""Added to the squared distance under the logarithm of the distance-ratio head, so that distance 0 stays finite."""


def prototypes(support: Float[Tensor, "*episodes way shot dim"]) -> Float[Tensor, "*episodes way dim"]:
    """Represent each class by the mean of its support embeddings (Snell et al., 2017, equation 1).

    Args:
        support: Support embeddings, one row of shots per class, after any number of leading episode dimensions.

    Returns:
        One prototype per class, in at least float32: half precision would round the mean of nearby embeddings away.

    Raises:
        ValueError: Without a single shot; the mean of nothing is not a prototype.

    References:
        Snell, Swersky, Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017.

    Examples:
        >>> import torch
        >>> prototypes(torch.tensor([[[0.0, 0.0], [2.0, 0.0]], [[0.0, 4.0], [0.0, 6.0]]]))
        tensor([[1., 0.],
                [0., 5.]])
    """
    if support.shape[-2] == 0:
        raise ValueError(
            f"A prototype is the mean of at least one support embedding; support of shape {tuple(support.shape)} has "
            "0 shots. Give (..., way, shot, dim) with shot >= 1."
        )
    return support.mean(dim=-2, dtype=_at_least_float32(support))


def squared_distances(
    query: Float[Tensor, "*episodes query dim"], prototypes: Float[Tensor, "*episodes way dim"]
) -> Float[Tensor, "*episodes query way"]:
    """Squared Euclidean distance of each query to each prototype.

    Summed from the differences of the coordinates. The shorter road over a matrix product (`|q|^2 + |p|^2 - 2 qp`)
    cancels when the embeddings share a large offset, and can even turn negative; this one does not. Autocast is off
    inside, so the distances of half-precision embeddings are float32.

    Args:
        query: Query embeddings.
        prototypes: One representative per class, with the same leading episode dimensions as `query`.

    Returns:
        Distances in [0, inf), in at least float32; float64 stays float64. Without queries or classes, an empty tensor.

    Examples:
        >>> import torch
        >>> squared_distances(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
        tensor([[ 0., 25.]])
    """
    dtype = torch.promote_types(_at_least_float32(query), _at_least_float32(prototypes))
    with torch.autocast(query.device.type, enabled=False):
        distances = torch.cdist(
            query.to(dtype), prototypes.to(dtype), compute_mode="donot_use_mm_for_euclid_dist"
        )  # (*episodes, query, way)
        return distances.square()


class SoftmaxHead(nn.Module):
    """The head of prototypical networks: the logit of a class is minus the squared distance to its prototype.

    No parameters. The probabilities depend on the scale of the embeddings: doubling all of them multiplies the logits
    by 4.

    References:
        Snell, Swersky, Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017.

    Examples:
        Distances 1 and 2 to the two prototypes:

        >>> import torch
        >>> head = SoftmaxHead()
        >>> head(torch.tensor([[0.0]]), torch.tensor([[1.0], [-2.0]])).softmax(dim=-1)
        tensor([[0.9526, 0.0474]])
    """

    def forward(
        self, query: Float[Tensor, "*episodes query dim"], prototypes: Float[Tensor, "*episodes way dim"]
    ) -> Float[Tensor, "*episodes query way"]:
        """Score each query against each prototype.

        Args:
            query: Query embeddings.
            prototypes: One representative per class, with the same leading episode dimensions as `query`.

        Returns:
            Logits `-d^2` in (-inf, 0], larger is closer, in at least float32 also under autocast.
        """
        return -squared_distances(query, prototypes)


class DistanceRatioHead(nn.Module):
    """The distance-ratio head: `p(c) = d_c^-rho / sum_y d_y^-rho`, that is logits `-rho ln d_c`.

    Only ratios of distances count: scaling all embeddings changes no probability. At a prototype the confidence goes to
    1 for its class and to 0 for the others. `1e-10` is added to the squared distance, so values and gradients
    stay finite at distance 0; the scale invariance holds for distances well above `1e-5`.

    Args:
        log_rho: Where the learnable `ln rho` starts; the paper starts at 2.

    Attributes:
        log_rho: The learnable scalar `ln rho`.

    Raises:
        ValueError: If `log_rho` is not finite.

    References:
        Kim, Parviainen, Malde, "Distance-Ratio-Based Formulation for Metric Learning".

    Examples:
        Distances 1 and 2 to the two prototypes, then 2 and 4; rho = 2:

        >>> import math
        >>> import torch
        >>> head = DistanceRatioHead(log_rho=math.log(2.0))
        >>> head(torch.tensor([[0.0]]), torch.tensor([[1.0], [-2.0]])).softmax(dim=-1).detach()
        tensor([[0.8000, 0.2000]])
        >>> head(torch.tensor([[0.0]]), torch.tensor([[2.0], [-4.0]])).softmax(dim=-1).detach()
        tensor([[0.8000, 0.2000]])
    """

    log_rho: nn.Parameter

    def __init__(self, log_rho: float = 2.0) -> None:
        super().__init__()
        if not math.isfinite(log_rho):
            raise ValueError(f"log_rho={log_rho} is not finite. Start ln rho at a finite number; the paper uses 2.0.")
        self.log_rho = nn.Parameter(torch.tensor(float(log_rho)))

    @property
    def rho(self) -> Float[Tensor, ""]:
        """The exponent of the distances, `exp(log_rho)`, in (0, inf) and in at least float32."""
        return self.log_rho.to(_at_least_float32(self.log_rho)).exp()

    def forward(
        self, query: Float[Tensor, "*episodes query dim"], prototypes: Float[Tensor, "*episodes way dim"]
    ) -> Float[Tensor, "*episodes query way"]:
        """Score each query against each prototype.

        Args:
            query: Query embeddings.
            prototypes: One representative per class, with the same leading episode dimensions as `query`.

        Returns:
            Logits `-rho / 2 * ln(d^2 + 1e-10)`, larger is closer, at most `11.52 rho`, in at least float32 also
            under autocast.
        """
        distances = squared_distances(query, prototypes)  # (*episodes, query, way)
        return -0.5 * self.log_rho.to(distances.dtype).exp() * (distances + EPSILON).log()

    def extra_repr(self) -> str:
        """The current exponent, for `print(model)`."""
        return f"rho={self.rho.item():.4g}"


def make_head(head: str | nn.Module) -> nn.Module:
    """Build a head from its name, or pass a module through.

    Args:
        head: `"softmax"` (`SoftmaxHead`), `"dr"` (`DistanceRatioHead`), or any module that maps
            `(query, prototypes)` of shapes (..., query, dim) and (..., way, dim) to logits (..., query, way),
            larger is closer.

    Returns:
        The head.

    Raises:
        ValueError: If the name is unknown.

    Examples:
        >>> make_head("dr")
        DistanceRatioHead(rho=7.389)
    """
    if isinstance(head, nn.Module):
        return head
    if head == "softmax":
        return SoftmaxHead()
    if head == "dr":
        return DistanceRatioHead()
    raise ValueError(
        f"There is no head {head!r}. Choose 'softmax' or 'dr', or pass an nn.Module (query, prototypes) -> logits."
    )


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
