"""Heads: they map the distances between queries and the points that represent classes to logits.

To write a head, subclass `DistanceHead` and define `logits`, or write any module `(query, points) -> logits`, and pass it to
`ProtoNet`. To give it a name on the command line, add an entry to `HeadName` and a line to `make_head`.
"""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._reading import refuse_unknown

Distance = Literal["euclidean", "unit_euclidean", "angular"]
"""The distance of two embeddings: Euclidean, or on the unit sphere the length of the chord or of the arc."""

HeadName = Literal["softmax", "dr"]
"""The names of heads; see `make_head`."""

# Added to the squared distance under the logarithm, so that logits are finite at distance 0. The paper adds the same value
# under its square root.
EPSILON = 1e-10


def prototypes(
    support: Float[Tensor, "*episodes way shot dim"], *, on_sphere: bool = False
) -> Float[Tensor, "*episodes way dim"]:
    """Return the prototype of each class: the mean of its support embeddings (Snell et al., 2017, equation 1).

    Prototypes are in at least float32, because half precision would lose the differences between nearby embeddings.

    Args:
        support: Support embeddings (way, shot, dim), with any leading episode dimensions.
        on_sphere: Whether to scale the embeddings to length 1 before the mean, for a head on the unit sphere. The head then
            also scales the mean to length 1.

    Raises:
        ValueError: There are no shots.

    References:
        Snell, Swersky, Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017.

    Examples:
        >>> import torch
        >>> prototypes(torch.tensor([[[0.0, 0.0], [2.0, 0.0]], [[0.0, 4.0], [0.0, 6.0]]]))
        tensor([[1., 0.],
                [0., 5.]])
    """
    if support.shape[-2] == 0:
        raise InputError(
            f"prototypes: the support has the shape {tuple(support.shape)} with 0 shots, but a prototype is the mean of at "
            "least one support embedding. Pass (..., way, shot, dim) with shot >= 1."
        )
    if on_sphere:
        support = on_unit_sphere(support)
    return support.mean(dim=-2, dtype=_at_least_float32(support))


def squared_distances(
    query: Float[Tensor, "*episodes query dim"],
    points: Float[Tensor, "*episodes point dim"],
    distance: Distance = "euclidean",
) -> Float[Tensor, "*episodes query point"]:
    """Return the squared distance of each query to each point that represents a class, in [0, inf).

    Distances are in at least float32, and in float64 for float64 inputs; autocast has no effect. Euclidean distances are
    computed from coordinate differences. The faster formula `|q|^2 + |p|^2 - 2 qp` loses digits if the embeddings share a
    large offset, and can become negative. Angles are `2 atan2(|q - p|, |q + p|)`, which is accurate near 0, where the arc
    cosine loses all digits.

    Args:
        query: Query embeddings (query, dim), with any leading episode dimensions.
        points: Points that represent the classes, with the same leading dimensions.
        distance: `"euclidean"`; `"unit_euclidean"`, the chord between both vectors scaled to length 1, in [0, 2]; or
            `"angular"`, the arc between these, in [0, pi]. A zero vector has no direction: its distance to every point is 1
            or pi / 2, respectively, and it gets no gradient.

    Raises:
        ValueError: The distance is unknown.

    Examples:
        >>> import torch
        >>> query, points = torch.tensor([[0.0, 2.0]]), torch.tensor([[0.0, 1.0], [3.0, 0.0]])
        >>> squared_distances(query, points)
        tensor([[ 1., 13.]])
        >>> squared_distances(query, points, "unit_euclidean").sqrt()
        tensor([[0.0000, 1.4142]])
        >>> squared_distances(query, points, "angular").sqrt()  # 0 and a right angle
        tensor([[0.0000, 1.5708]])
    """
    check_distance(distance, "squared_distances")
    dtype = torch.promote_types(_at_least_float32(query), _at_least_float32(points))
    with torch.autocast(query.device.type, enabled=False):
        query = query.to(dtype)
        points = points.to(dtype)
        if distance == "euclidean":
            return _distances(query, points).square()
        query = on_unit_sphere(query)
        points = on_unit_sphere(points)
        chords = _distances(query, points)
        if distance == "unit_euclidean":
            return chords.square()
        opposite_chords = _distances(query, -points)
        return (2 * torch.atan2(chords, opposite_chords)).square()


def _distances(query: Tensor, points: Tensor) -> Tensor:
    """Return Euclidean distances, computed from coordinate differences."""
    return torch.cdist(query, points, compute_mode="donot_use_mm_for_euclid_dist")


def on_unit_sphere(embeddings: Float[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
    """Return embeddings scaled to length 1, in at least float32; a zero vector stays zero without gradient.

    Examples:
        >>> import torch
        >>> on_unit_sphere(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    embeddings = embeddings.to(_at_least_float32(embeddings))
    lengths = torch.linalg.vector_norm(embeddings, dim=-1, keepdim=True)  # (*shape, 1)
    # Numerator and denominator are replaced before the division: the gradient of 0 / 0 would be NaN, even if `where` drops
    # its result.
    return torch.where(lengths > 0, embeddings, 0.0) / torch.where(lengths > 0, lengths, 1.0)


def check_distance(distance: str, owner: str) -> None:
    """Raise an error if the distance is unknown."""
    fix = "Choose 'euclidean', or on the unit sphere 'unit_euclidean' or 'angular'."
    refuse_unknown(owner, "distance", distance, Distance, fix)


class DistanceHead(nn.Module):
    """Base class of heads: a logit decreases with the distance between the query and a point that represents a class.

    The caller chooses the points: prototypes, support points, or learned vectors.

    Args:
        distance: `"euclidean"`, or on the unit sphere `"unit_euclidean"` or `"angular"`; see `squared_distances`.

    Shape:
        `head(query, points)` with (..., query, dim) and (..., point, dim) returns logits (..., query, point), in float32 or
        float64. A larger logit is closer.

    Examples:
        A head that uses the distance instead of its square:

        >>> import torch
        >>> class LaplaceHead(DistanceHead):
        ...     def logits(self, squared):
        ...         return -squared.sqrt()
        >>> LaplaceHead()(torch.tensor([[0.0]]), torch.tensor([[1.0], [-2.0]])).softmax(dim=-1)
        tensor([[0.7311, 0.2689]])
    """

    def __init__(self, distance: Distance = "euclidean") -> None:
        super().__init__()
        check_distance(distance, type(self).__name__)
        self.distance: Distance = distance

    @property
    def on_sphere(self) -> bool:
        """Whether the logits depend only on the directions of embeddings."""
        return self.distance != "euclidean"

    def logits(self, squared: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return a logit for each squared distance; larger is closer.

        Args:
            squared: Squared distances, in at least float32.

        Raises:
            NotImplementedError: The subclass does not define this method.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define logits(squared). Define it in the class: it maps squared distances to "
            "logits, larger is closer."
        )

    def forward(
        self, query: Float[Tensor, "*episodes query dim"], points: Float[Tensor, "*episodes point dim"]
    ) -> Float[Tensor, "*episodes query point"]:
        """Return the logit of each query and point, in at least float32 also with autocast; larger is closer.

        Args:
            query: Query embeddings (query, dim), with any leading episode dimensions.
            points: Points that represent the classes, with the same leading dimensions.
        """
        return self.logits(squared_distances(query, points, self.distance))

    def extra_repr(self) -> str:
        """Return the distance, for `print(model)`, if it is not the default."""
        return "" if self.distance == "euclidean" else f"distance={self.distance!r}"


class SoftmaxHead(DistanceHead):
    """The head of prototypical networks: the logit of a class is minus the squared distance to its prototype.

    The probability of class c at the distance d_c to its prototype is `p(c) = exp(-d_c^2) / sum_y exp(-d_y^2)`. The head has
    no parameters. The probabilities depend on the scale of the embeddings: twice as large embeddings have four
    times as large logits.

    Args:
        distance: `"euclidean"`, or on the unit sphere `"unit_euclidean"` or `"angular"`. With `"unit_euclidean"` the
            probabilities are the softmax of twice the cosine similarities.

    Shape:
        `head(query, points)` with (..., query, dim) and (..., point, dim) returns logits (..., query, point), at most 0.

    References:
        Snell, Swersky, Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017.

    Examples:
        Distances 1 and 2 to the two prototypes:

        >>> import torch
        >>> head = SoftmaxHead()
        >>> head(torch.tensor([[0.0]]), torch.tensor([[1.0], [-2.0]])).softmax(dim=-1)
        tensor([[0.9526, 0.0474]])
    """

    def logits(self, squared: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the logits `-d^2` in (-inf, 0]; see `DistanceHead.logits`."""
        return -squared


class DistanceRatioHead(DistanceHead):
    """The distance-ratio head: the logit of a class is `-rho ln d_c`, where d_c is the distance to its prototype.

    The probability of class c is `p(c) = d_c^-rho / sum_y d_y^-rho`, where `rho` is learned. The probabilities depend only
    on ratios of distances, so they do not change if you scale all embeddings. At a prototype, the probability of its class
    is nearly 1.

    `1e-10` is added to each squared distance, so that values and gradients are finite at distance 0. This matters only for
    very small embeddings: scaling changes probabilities by less than 1e-6 if all distances are above `sqrt(rho) * 3.6e-3`
    (about 0.01 at the initial rho = 7.39). At smaller distances the probabilities become flatter. At distances around 1e-5
    all classes are equally likely.

    In float32, logits near -70 have rounding errors of 4e-6, and the probabilities have errors of the same size.
    `ClassVectors.probabilities` and `SupportClassifier.probabilities` compute in float64 and avoid these errors.

    Args:
        log_rho: Initial value of the learnable `ln rho`; the paper uses 2.
        distance: `"euclidean"`, or on the unit sphere `"unit_euclidean"` or `"angular"`.

    Attributes:
        log_rho: The learnable scalar `ln rho`.

    Shape:
        `head(query, points)` with (..., query, dim) and (..., point, dim) returns logits (..., query, point), at most
        11.52 rho.

    Raises:
        ValueError: `log_rho` is not finite.

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

    def __init__(self, log_rho: float = 2.0, distance: Distance = "euclidean") -> None:
        super().__init__(distance)
        if not math.isfinite(log_rho):
            raise InputError(
                f"DistanceRatioHead: log_rho={log_rho} is not finite. Use a finite number; the paper uses 2.0."
            )
        self.log_rho = nn.Parameter(torch.tensor(float(log_rho)))

    @property
    def rho(self) -> Float[Tensor, ""]:
        """The exponent of the distances, `exp(log_rho)`, in (0, inf) and in at least float32."""
        return self.log_rho.to(_at_least_float32(self.log_rho)).exp()

    def logits(self, squared: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the logits `-rho / 2 * ln(d^2 + 1e-10)`, at most `11.52 rho`; see `DistanceHead.logits`."""
        # Not `self.rho`, which has the rounding error of float32 also for float64 distances.
        rho = self.log_rho.to(squared.dtype).exp()
        return -0.5 * rho * (squared + EPSILON).log()

    def extra_repr(self) -> str:
        """Return the current exponent, for `print(model)`, and the distance if it is not the default."""
        rho = f"rho={self.rho.item():.4g}"
        distance = super().extra_repr()
        return f"{rho}, {distance}" if distance else rho


def make_head(head: str | nn.Module) -> nn.Module:
    """Return the head with this name; a module is returned unchanged.

    Args:
        head: `"softmax"` (`SoftmaxHead`), `"dr"` (`DistanceRatioHead`), or any module that maps queries (..., query,
            dim) and prototypes (..., way, dim) to logits (..., query, way), such as
            `DistanceRatioHead(distance="angular")`. A larger logit is closer.

    Raises:
        ValueError: The name is unknown.

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
    names = " or ".join(map(repr, get_args(HeadName)))
    raise InputError(f"There is no head {head!r}. Choose {names}, or pass an nn.Module (query, prototypes) -> logits.")


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


Representation = Literal["mean", "nearest"]
"""`"mean"` is the prototype of Snell et al., `"nearest"` the support point that is nearest to the query."""


def class_logits(
    head: nn.Module,
    query: Float[Tensor, "*episodes query dim"],
    support: Float[Tensor, "*episodes way shot dim"],
    representation: Representation = "mean",
) -> Float[Tensor, "*episodes query way"]:
    """Return the logits of each query for each class of its episode; larger is closer.

    `"mean"` represents a class by the mean of its support. This is the best point for the softmax head, because it maximises
    the likelihood of Gaussians.

    `"nearest"` represents a class by its support point that is nearest to the query, `d_c = min_i d(query, support_i)`: a
    differentiable nearest-neighbour classifier. With the distance-ratio head and several shots, the support points are the
    most likely points, and the mean is not (appendix A.2 of the paper). With one shot both are the same.

    Args:
        head: Module that maps queries (..., query, dim) and points (..., point, dim) to logits (..., query, point). A logit
            must depend only on its own query and point.
        query: Query embeddings.
        support: Support embeddings of the same episodes.
        representation: `"mean"` or `"nearest"`.

    Raises:
        ValueError: The representation is unknown, or there are no shots.

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
    ways, shots = support.shape[-3:-1]
    # With one shot both are the same, and `prototypes` raises the error for 0 shots.
    if representation == "mean" or shots <= 1:
        on_sphere = isinstance(head, DistanceHead) and head.on_sphere
        logits: Tensor = head(query, prototypes(support, on_sphere=on_sphere))
        return logits
    point_logits: Tensor = head(query, support.flatten(-3, -2))  # (*episodes, query, way * shot)
    nearest: Tensor = point_logits.unflatten(-1, (ways, shots)).amax(dim=-1)  # (*episodes, query, way)
    return nearest


def check_representation(representation: str, owner: str) -> None:
    """Raise an error if the representation of a class is unknown."""
    fix = "Choose 'mean', the prototype of a class, or 'nearest', its support point that is nearest to the query."
    refuse_unknown(owner, "representation", representation, Representation, fix)
