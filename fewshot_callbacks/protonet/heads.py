"""Heads: map the distances between queries and the points that represent classes to logits.

A further head is a subclass of `DistanceHead` with a method `logits`, or any module `(query, points) -> logits`. `ProtoNet`
takes it as it is. For a name of its own it needs an entry in `HeadName`, which the command reads, and a line in `make_head`.
"""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._reading import refuse_unknown

Distance = Literal["euclidean", "unit_euclidean", "angular"]
"""How far apart two embeddings are: as they are, or on the unit sphere by the chord or by the arc."""

HeadName = Literal["softmax", "dr"]
"""The heads that have a name; see `make_head`."""

# Added to the squared distance under the logarithm of the distance-ratio head, so that distance 0 stays finite; the paper
# adds the same value under its square root.
EPSILON = 1e-10


def prototypes(
    support: Float[Tensor, "*episodes way shot dim"], *, on_sphere: bool = False
) -> Float[Tensor, "*episodes way dim"]:
    """Represent each class by the mean of its support embeddings (Snell et al., 2017, equation 1).

    Args:
        support: Support embeddings, one row of shots per class, after any number of leading episode dimensions.
        on_sphere: Take the mean of the embeddings scaled to length 1, for a head on the unit sphere (which then scales
            the mean to length 1, too).

    Returns:
        One prototype per class, in at least float32, since half precision would lose the differences between nearby
        embeddings.

    Raises:
        ValueError: If there are no shots.

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
            f"A prototype is the mean of at least one support embedding; support of shape {tuple(support.shape)} has "
            "0 shots. Give (..., way, shot, dim) with shot >= 1."
        )
    if on_sphere:
        support = on_unit_sphere(support)
    return support.mean(dim=-2, dtype=_at_least_float32(support))


def squared_distances(
    query: Float[Tensor, "*episodes query dim"],
    points: Float[Tensor, "*episodes point dim"],
    distance: Distance = "euclidean",
) -> Float[Tensor, "*episodes query point"]:
    """Compute the squared distance of each query to each point that represents a class.

    Euclidean distances are summed from the differences of the coordinates. The faster formula with a matrix product
    (`|q|^2 + |p|^2 - 2 qp`) loses digits when the embeddings share a large offset, and can even become negative; this
    one does not. Angles come from the chord and the chord to the opposite point, `2 atan2(|q - p|, |q + p|)`, which
    stays exact where the arc cosine loses all digits, near 0. Autocast is off inside, so the distances of
    half-precision embeddings are float32.

    Args:
        query: Query embeddings.
        points: Points that represent the classes, with the same leading episode dimensions as `query`.
        distance: `"euclidean"`; `"unit_euclidean"`: the chord between both, scaled to length 1, in [0, 2]; `"angular"`:
            the arc between these, in [0, pi]. An embedding of length 0 has no direction: it stays at the origin,
            at chord 1 and angle pi / 2 from every point, and gets no gradient.

    Returns:
        Squared distances in [0, inf), in at least float32; float64 stays float64. Without queries or points, an empty
        tensor.

    Raises:
        ValueError: If the distance is unknown.

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
    """Return Euclidean distances, summed from the differences of the coordinates."""
    return torch.cdist(query, points, compute_mode="donot_use_mm_for_euclid_dist")


def on_unit_sphere(embeddings: Float[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
    """Return each embedding scaled to length 1; an embedding of length 0 is unchanged, without a gradient.

    Args:
        embeddings: Embeddings, with any number of leading dimensions.

    Returns:
        Embeddings of the same shape, in at least float32.

    Examples:
        >>> import torch
        >>> on_unit_sphere(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    embeddings = embeddings.to(_at_least_float32(embeddings))
    lengths = torch.linalg.vector_norm(embeddings, dim=-1, keepdim=True)  # (*shape, 1)
    # Numerator and denominator are replaced before the division: the gradient of 0 / 0 would be NaN, even if `where` drops
    # its value.
    return torch.where(lengths > 0, embeddings, 0.0) / torch.where(lengths > 0, lengths, 1.0)


def check_distance(distance: str, owner: str) -> None:
    """Refuse an unknown distance.

    Args:
        distance: The distance.
        owner: The function or class that it was passed to, for the message.

    Raises:
        ValueError: If the distance is unknown.
    """
    fix = "Choose 'euclidean', or on the unit sphere 'unit_euclidean' or 'angular'."
    refuse_unknown(owner, "distance", distance, Distance, fix)


class DistanceHead(nn.Module):
    """Base of the heads: a logit falls with the distance of the query to the point that represents a class.

    The caller chooses these points: prototypes, single support points, or learned vectors.

    Args:
        distance: See `squared_distances`.
    """

    def __init__(self, distance: Distance = "euclidean") -> None:
        super().__init__()
        check_distance(distance, type(self).__name__)
        self.distance: Distance = distance

    @property
    def on_sphere(self) -> bool:
        """Whether the head depends only on the directions of embeddings."""
        return self.distance != "euclidean"

    def logits(self, squared: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Compute the logits of squared distances.

        Args:
            squared: Squared distances, in at least float32.

        Returns:
            One logit for each, larger is closer.

        Raises:
            NotImplementedError: If a subclass does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no logits(squared). Define it in the class: from squared distances to logits, "
            "larger is closer."
        )

    def forward(
        self, query: Float[Tensor, "*episodes query dim"], points: Float[Tensor, "*episodes point dim"]
    ) -> Float[Tensor, "*episodes query point"]:
        """Score each query against each point.

        Args:
            query: Query embeddings.
            points: Points that represent the classes, with the same leading episode dimensions as `query`.

        Returns:
            Logits, larger is closer, in at least float32 also under autocast.
        """
        return self.logits(squared_distances(query, points, self.distance))

    def extra_repr(self) -> str:
        """Show the distance in `print(model)` where it is not the usual one."""
        return "" if self.distance == "euclidean" else f"distance={self.distance!r}"


class SoftmaxHead(DistanceHead):
    """The head of prototypical networks: the logit of a class is minus the squared distance to its prototype.

    It has no parameters. The probabilities depend on the scale of the embeddings: doubling all of them multiplies the
    logits by 4.

    Args:
        distance: See `squared_distances`. With `"unit_euclidean"` this is the softmax over cosine similarities, times 2.

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
    """The distance-ratio head: `p(c) = d_c^-rho / sum_y d_y^-rho`, that is logits `-rho ln d_c`.

    Only ratios of distances matter: scaling all embeddings does not change the probabilities. At a prototype the
    probability of its class is nearly 1. `1e-10` is added to the squared distance, so values and gradients stay finite
    at distance 0. It has an effect for very small embeddings: scaling changes probabilities by less than 1e-6 if all
    distances are above `sqrt(rho) * 3.6e-3` (about 0.01 at the initial rho = 7.39). At smaller distances the
    probabilities flatten, until around 1e-5 all classes become equally likely.

    In float32, logits near -70 have rounding errors of 4e-6, which carry over to probabilities at any scale; the method
    `probabilities` of `ClassVectors` and `SupportClassifier` computes in float64 and avoids them.

    Args:
        log_rho: Initial value of the learnable `ln rho`; the paper uses 2.
        distance: See `squared_distances`.

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

    def __init__(self, log_rho: float = 2.0, distance: Distance = "euclidean") -> None:
        super().__init__(distance)
        if not math.isfinite(log_rho):
            raise InputError(f"log_rho={log_rho} is not finite. Start ln rho at a finite number; the paper uses 2.0.")
        self.log_rho = nn.Parameter(torch.tensor(float(log_rho)))

    @property
    def rho(self) -> Float[Tensor, ""]:
        """The exponent of the distances, `exp(log_rho)`, in (0, inf) and in at least float32."""
        return self.log_rho.to(_at_least_float32(self.log_rho)).exp()

    def logits(self, squared: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the logits `-rho / 2 * ln(d^2 + 1e-10)`, at most `11.52 rho`; see `DistanceHead.logits`."""
        # rho is computed in the type of the distances: float64 distances would inherit the rounding of the float32
        # `self.rho`.
        rho = self.log_rho.to(squared.dtype).exp()
        return -0.5 * rho * (squared + EPSILON).log()

    def extra_repr(self) -> str:
        """Show the current exponent in `print(model)`, and the distance where it is not the usual one."""
        rho = f"rho={self.rho.item():.4g}"
        distance = super().extra_repr()
        return f"{rho}, {distance}" if distance else rho


def make_head(head: str | nn.Module) -> nn.Module:
    """Build a head from its name, or pass a module through.

    Args:
        head: `"softmax"` (`SoftmaxHead`), `"dr"` (`DistanceRatioHead`), or any module that maps
            `(query, prototypes)` of shapes (..., query, dim) and (..., way, dim) to logits (..., query, way),
            larger is closer, such as `DistanceRatioHead(distance="angular")`.

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
    names = " or ".join(map(repr, get_args(HeadName)))
    raise InputError(f"There is no head {head!r}. Choose {names}, or pass an nn.Module (query, prototypes) -> logits.")


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


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
        representation: What represents a class, `"mean"` or `"nearest"`.

    Returns:
        Logits, larger is closer.

    Raises:
        ValueError: If the representation is unknown, or there is no shot.

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
    # With one shot both are the same, and `prototypes` refuses 0 shots with a message.
    if representation == "mean" or shots <= 1:
        on_sphere = isinstance(head, DistanceHead) and head.on_sphere
        logits: Tensor = head(query, prototypes(support, on_sphere=on_sphere))
        return logits
    point_logits: Tensor = head(query, support.flatten(-3, -2))  # (*episodes, query, way * shot)
    nearest: Tensor = point_logits.unflatten(-1, (ways, shots)).amax(dim=-1)  # (*episodes, query, way)
    return nearest


def check_representation(representation: str, owner: str) -> None:
    """Refuse an unknown representation of a class.

    Args:
        representation: The representation.
        owner: The function or class that it was passed to, for the message.

    Raises:
        ValueError: If the representation is unknown.
    """
    fix = "Choose 'mean', the prototype of a class, or 'nearest', its support point nearest to the query."
    refuse_unknown(owner, "representation", representation, Representation, fix)
