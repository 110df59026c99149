"""Classifiers outside episodes: a head over learned class vectors, and a head over a fixed support set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import read_labels
from fewshot_callbacks.functional._reading import as_tensor, check_embeddings, non_finite_rows, refuse_non_finite
from fewshot_callbacks.protonet.heads import (
    DistanceHead,
    DistanceRatioHead,
    Representation,
    check_representation,
    on_unit_sphere,
)
from fewshot_callbacks.system.words import counted


class ClassVectors(nn.Module):
    """Classifier layer with one learned vector per class; a head turns distances to these vectors into logits.

    With `DistanceRatioHead(distance="angular")` or `distance="unit_euclidean"`, this layer can replace a cosine-margin
    classifier (NormFace, CosFace, ArcFace). Unlike these classifiers, its confidence is largest at the vector of a class
    (appendix E of the paper).

    Args:
        classes: Number of classes, at least 1.
        dim: Dimension of the embeddings, at least 1.
        head: Module that maps embeddings (items, dim) and vectors (classes, dim) to logits (items, classes); by default the
            distance-ratio head with angular distances.

    Attributes:
        vectors: (classes, dim), the learned vectors, initialised from the standard normal distribution.
        head: The head.

    Raises:
        ValueError: `classes` or `dim` is below 1.

    References:
        Kim, Parviainen, Malde, "Distance-Ratio-Based Formulation for Metric Learning", section 4 and appendix E.

    Examples:
        >>> import torch
        >>> layer = ClassVectors(classes=10, dim=64)
        >>> layer(torch.randn(5, 64)).shape  # logits for nn.functional.cross_entropy
        torch.Size([5, 10])
    """

    vectors: nn.Parameter

    def __init__(self, classes: int, dim: int, head: nn.Module | None = None) -> None:
        super().__init__()
        if classes < 1 or dim < 1:
            raise InputError(f"ClassVectors(classes={classes}, dim={dim}): use values of at least 1.")
        self.vectors = nn.Parameter(torch.randn(classes, dim))
        self.head = DistanceRatioHead(distance="angular") if head is None else head

    def forward(self, embeddings: Float[Tensor, "items dim"]) -> Float[Tensor, "items classes"]:
        """Return the logits of each class; larger is closer."""
        logits: Tensor = self.head(embeddings, self.vectors)
        return logits

    def probabilities(self, embeddings: Float[Tensor, "items dim"]) -> Float[Tensor, "items classes"]:
        """Return the probability of each class, (items, classes); each row sums to 1.

        The probabilities are computed in float64 if the device supports it, and returned in at least float32.

        Raises:
            ValueError: An embedding or its logits are not finite.
        """
        call = "ClassVectors.probabilities"
        refuse_non_finite(non_finite_rows(embeddings), len(embeddings), "embeddings", call)
        logits: Tensor = self.head(_exact(embeddings), _exact(self.vectors))
        _refuse_undecided(logits, call)
        return _softmax(logits, embeddings)

    def extra_repr(self) -> str:
        """Return the sizes, for `print(model)`."""
        return f"classes={self.vectors.shape[0]}, dim={self.vectors.shape[1]}"


class SupportClassifier(nn.Module):
    """Few-shot classifier: fit it to a few labelled embeddings, then predict the classes of other embeddings.

    The support is not part of the `state_dict`: call `fit` again after loading.

    Args:
        head: Module that maps embeddings (queries, dim) and points (points, dim) to logits (queries, points); larger is
            closer.
        representation: `"mean"` represents a class by the mean of its support, `"nearest"` by its support point that is
            nearest to the query.
        embed: Function that embeds the inputs of all methods; by default the inputs are embeddings.

    Attributes:
        classes: (classes,), the sorted labels of the support: the columns of logits and probabilities. If labels are
            strings, these are indices in `class_names`. None before `fit`.
        class_names: The sorted string labels of the support; None if labels are integers.

    Raises:
        ValueError: The representation is unknown.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks.protonet import DistanceRatioHead
        >>> classifier = SupportClassifier(DistanceRatioHead())
        >>> support, labels = torch.tensor([[0.0, 0.0], [0.0, 2.0], [9.0, 0.0]]), torch.tensor([7, 7, 3])
        >>> classifier.fit(support, labels).predict(torch.tensor([[0.0, 1.5], [8.0, 1.0]]))
        tensor([7, 3])
    """

    def __init__(
        self,
        head: nn.Module,
        representation: Representation = "mean",
        *,
        embed: Callable[[Tensor], Float[Tensor, "items dim"]] | None = None,
    ) -> None:
        super().__init__()
        check_representation(representation, "SupportClassifier")
        self._embed = embed
        self.head = head
        self.representation = representation
        self.classes: Int[Tensor, "classes"] | None = None
        self.class_names: tuple[str, ...] | None = None
        # Not buffers: their shapes depend on the support, and loading a `state_dict` with another shape would fail.
        self._points = torch.empty(0)  # (points, dim)
        self._class_of_point = torch.empty(0, dtype=torch.int64)  # (points,): positions in `classes`

    def fit(self, items: Any, labels: Any) -> SupportClassifier:
        """Store a new support set, and return the classifier itself.

        Args:
            items: (items, dim) embeddings, which are detached; or inputs of `embed`.
            labels: (items,), the class of each item, integers or strings. Classes may have different numbers of items.

        Raises:
            ValueError: There are no items, an embedding is not finite, or the number of labels differs.
        """
        call = "SupportClassifier.fit"
        embeddings = self._embeddings_of(items, call)
        check_embeddings(embeddings, "embeddings", call)
        numbers, self.class_names = read_labels(labels, len(embeddings), "labels", "embeddings", call).encoded()
        points = _exact(embeddings.detach())
        self.classes, members = torch.unique(numbers.to(points.device), return_inverse=True)
        if self.representation == "mean":
            if isinstance(self.head, DistanceHead) and self.head.on_sphere:
                points = on_unit_sphere(points)
            # Not `prototypes`, which needs the same number of items per class.
            sums = points.new_zeros(len(self.classes), points.shape[1]).index_add_(0, members, points)
            points = sums / members.bincount(minlength=len(self.classes))[:, None]
            members = torch.arange(len(self.classes), device=points.device)
        self._points = points
        self._class_of_point = members
        return self

    @torch.no_grad()
    def probabilities(self, items: Any) -> Float[Tensor, "queries classes"]:
        """Return the probability of each class, (queries, classes), in the order of `classes`; each row sums to 1.

        The probabilities are computed in float64 if the device supports it, and returned in at least float32.

        Args:
            items: (queries, dim) embeddings, or inputs of `embed`.

        Raises:
            ValueError: `fit` was not called, the dimension differs from the support, or an embedding or its logits are not
                finite.
        """
        embeddings = self._embedded(items)
        logits = self._decided_logits(embeddings, "SupportClassifier.probabilities")
        return _softmax(logits, items if isinstance(items, Tensor) else embeddings)

    @torch.no_grad()
    def predict(self, items: Any) -> Int[Tensor, "queries"] | list[str]:
        """Return the label of the class with the largest logit; if classes tie, the smallest label.

        Args:
            items: (queries, dim) embeddings, or inputs of `embed`.

        Returns:
            An integer tensor (queries,), or a list of strings if the labels in `fit` were strings.

        Raises:
            ValueError: `fit` was not called, the dimension differs from the support, or an embedding or its logits are not
                finite.
        """
        best = self._decided_logits(self._embedded(items), "SupportClassifier.predict").argmax(dim=-1)  # (queries,)
        labels = self._fitted_classes().to(best.device)[best]
        return labels if self.class_names is None else [self.class_names[label] for label in labels.tolist()]

    def forward(self, items: Any) -> Float[Tensor, "queries classes"]:
        """Return the logits, (queries, classes), in the order of `classes`; larger is closer.

        The logits of an embedding that is not finite are NaN.

        Args:
            items: (queries, dim) embeddings, or inputs of `embed`.

        Raises:
            ValueError: `fit` was not called, or the dimension differs from the support.
        """
        return self._logits(self._embedded(items))

    def _decided_logits(self, embeddings: Tensor, call: str) -> Tensor:
        """Return the logits; raise an error if an embedding or a query's largest logit is not finite."""
        refuse_non_finite(non_finite_rows(embeddings), len(embeddings), "embeddings", call)
        logits = self._logits(embeddings)
        _refuse_undecided(logits, call)
        return logits

    def _embeddings_of(self, items: Any, call: str) -> Tensor:
        """Return the embeddings of items without checks."""
        embeddings: Any = items if self._embed is None else self._embed(items)
        # A tensor is not detached, because its gradient may be needed.
        return embeddings if isinstance(embeddings, Tensor) else as_tensor(embeddings, "embeddings", call)

    def _embedded(self, items: Any) -> Tensor:
        """Return the embeddings of queries; raise an error if their dimension differs from the support."""
        self._fitted_classes()
        embeddings = self._embeddings_of(items, type(self).__name__)
        if embeddings.shape[-1] != self._points.shape[1]:
            raise InputError(
                f"{type(self).__name__}: the embeddings have {counted(embeddings.shape[-1], 'dimension')}, but the support "
                f"has {self._points.shape[1]}. Embed both with the same model."
            )
        return embeddings

    def _logits(self, embeddings: Tensor) -> Tensor:
        """Return the largest logit among the points of each class."""
        classes = self._fitted_classes()
        points = self._points.to(embeddings.device)
        logits: Tensor = self.head(_exact(embeddings), points)  # (queries, points)
        class_of_logit = self._class_of_point.to(logits.device).expand_as(logits)
        # Each class has a point, so every -inf is replaced.
        lowest = logits.new_full((len(logits), len(classes)), -torch.inf)
        return lowest.scatter_reduce(1, class_of_logit, logits, reduce="amax")  # (queries, classes)

    def _fitted_classes(self) -> Tensor:
        """Return the classes of the support; raise an error before `fit`."""
        if self.classes is None:
            raise InputError(
                f"{type(self).__name__} has no support set yet. Call fit(support_embeddings, support_labels) first."
            )
        return self.classes


def _exact(embeddings: Tensor) -> Tensor:
    """Return embeddings in float64, or in float32 on MPS, which does not support float64."""
    return embeddings.float() if embeddings.device.type == "mps" else embeddings.double()


def _refuse_undecided(logits: Tensor, call: str) -> None:
    """Raise an error if the largest logit of a query is not finite: all are -inf, or a logit is NaN or +inf."""
    undecided = (~logits.amax(dim=-1).isfinite()).nonzero().flatten()
    if len(undecided):
        raise InputError(
            f"{call}: the logits of {len(undecided)} of {counted(len(logits), 'embedding')} are not finite, the first at "
            f"index {int(undecided[0])}, so no class can be predicted. Check the head (its rho, its class vectors), and "
            "scale down the embeddings if their squared distances overflow."
        )


def _softmax(logits: Tensor, embeddings: Tensor) -> Tensor:
    """Return the probabilities in the dtype of the embeddings, at least float32."""
    dtype = torch.promote_types(embeddings.dtype, torch.float32) if embeddings.is_floating_point() else torch.float32
    return logits.softmax(dim=-1).to(dtype)
