"""The discriminant ratio J: scatter between classes over scatter within classes, computed from traces.

J = Tr(S_B) / (Tr(S_W) + eps Tr(S_T)) with Tr(S_W) = sum over items of |E_i - mu_class|^2, Tr(S_B) = sum over classes of
n_c |mu_c - mu|^2 and Tr(S_T) = Tr(S_B) + Tr(S_W) (Fisher's criterion; K. Fukunaga, "Introduction to Statistical Pattern
Recognition", 1990, chapter 10). J (N - C) / (C - 1) is the index of Calinski and Harabasz (1974). The d x d matrices are
never computed, only their traces, so time and memory are O(B d).

Numerics. Each class is measured relative to one of its own items, its origin. A common offset cancels in E_i - origin. The
rounding error of this difference is relative to the diameter of the class, so an outlier in one class does not affect
other classes. Any item can be the origin. The choice, and so the order of the items, only changes the last digits. All
computations are in float64, which can represent the squares of narrower types. float64 embeddings are scaled before they
are squared, and may be as large as 1e300.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional import _scatter_kernel
from fewshot_callbacks.functional._labels import Labels, as_labels, encode, join, on_cpu
from fewshot_callbacks.functional._reading import as_floats, as_tensor, matrix_from, tensor_code

# This default keeps J finite in float32 (at most 1e30) and does not change any digit of a J below 1e14.
EPS = 1e-30
# Number of rows that are converted to float64 at a time.
ROWS_AT_ONCE = 4096


def discriminant_ratio(
    embeddings: Any, labels: Any, *, eps: float = EPS, normalize: bool = False, skip_singletons: bool = False
) -> Float[Tensor, ""]:
    """Return J of a batch: the scatter between classes over the scatter within classes. Larger is better separated.

    The result is on the device of the embeddings, and the call does not wait for the device. The module docstring has the
    formula and its source.

    Args:
        embeddings: (items, dim), any floating dtype. The computation is in float64 (in float32 on MPS, which has no
            float64).
        labels: (items,) integers of any value, or strings. A tensor must be on the same device.
        eps: Share of the total scatter Tr(S_T) that is added to the scatter within classes. J is at most 1 / eps, if all
            items of each class are equal. eps is relative to the scatter, so J does not depend on the scale of the
            embeddings.
        normalize: Scale each embedding to length 1 first. This changes J, unlike a common scale of all embeddings.
        skip_singletons: Leave out classes with a single item. They add scatter between classes, but none within classes.

    Returns:
        A scalar on the same device, in [0, 1 / eps], without a gradient. NaN if J is undefined: every class has one item,
        the batch is empty, or all embeddings are equal (0 / 0). The dtype is float64 for float64 embeddings, else float32.

    Raises:
        ValueError: If embeddings are not (items, dim), or if labels are not one integer or string per item. Values are not
            checked, because that would wait for the device. NaN or Inf in the embeddings makes J NaN.

    Examples:
        >>> import torch
        >>> embeddings = torch.tensor([[0.0, 0.0], [0.0, 2.0], [4.0, 0.0], [4.0, 2.0]])
        >>> round(discriminant_ratio(embeddings, torch.tensor([0, 0, 1, 1])).item(), 6)  # 16 / 4
        4.0
    """
    return batch_ratios(
        embeddings, labels, eps=eps, normalize=normalize, skip_singletons=skip_singletons, call="discriminant_ratio"
    )[0]


def batch_ratios(
    embeddings: Any,
    labels: Any,
    *,
    eps: float = EPS,
    normalize: bool = False,
    skip_singletons: bool = False,
    call: str = "batch_ratios",
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return J and the variance ratio of one batch, from one computation.

    `eps` is the share of the total scatter that is added to the scatter within classes, for J. `normalize` scales each
    embedding to length 1. `skip_singletons` leaves out classes with a single item, for J; the variance ratio is correct
    with them.
    """
    rows, item_labels = read_batch(embeddings, labels, call)
    codes = item_labels.codes.to(rows.device)
    if _suits_kernel(rows):
        items = rows.detach().float().contiguous()
        if normalize:
            items = unit_rows(items.double())
        values = _scatter_kernel.ratios(items.numpy(), codes.long().contiguous().numpy(), eps, skip_singletons)
        j, ratio = torch.tensor(values, dtype=torch.float32, device="cpu").unbind()
        return j, ratio
    with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
        batch = BatchScatter.of(rows, codes, normalize=normalize)
        return batch.discriminant_ratio(eps=eps, skip_singletons=skip_singletons), batch.variance_ratio()


def _suits_kernel(rows: Tensor) -> bool:
    """Return whether the compiled kernel can be used.

    It cannot be used for float64, because squares may overflow; for tensors without values, as in a compiled graph; or for
    tensors on an accelerator.
    """
    holds_values = type(rows) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    return holds_values and rows.device.type == "cpu" and rows.dtype != torch.float64


def read_batch(embeddings: Any, labels: Any, function: str) -> tuple[Tensor, Labels]:
    """Return embeddings without a gradient, and their labels. Values are not checked: that would wait for the device."""
    code = tensor_code("embeddings", embeddings)
    embeddings = as_tensor(embeddings, "embeddings", function)
    item_labels = as_labels(labels, "labels", function)
    if embeddings.ndim != 2 or not embeddings.is_floating_point():
        fix = as_floats(code, embeddings.dtype) if embeddings.ndim == 2 else matrix_from(code, embeddings.ndim)
        raise InputError(
            f"{function} needs floating-point embeddings of shape (items, dim); got {embeddings.dtype} of shape "
            f"{tuple(embeddings.shape)}. {fix}"
        )
    if len(item_labels) != len(embeddings):
        raise InputError(
            f"{function} needs one label for each of the {len(embeddings)} embeddings; got {len(item_labels)} labels. Pass "
            "the labels of the same items in the same order."
        )
    return embeddings, item_labels


@dataclass(frozen=True)
class BatchScatter:
    """The sums of one batch from which J and the variance ratio are computed, in PyTorch operations.

    No shape depends on values, so nothing waits for the device.
    """

    items: Float[Tensor, "items dim"]
    deviations: Float[Tensor, "items dim"]
    """each item minus the mean of its class"""
    offset: Float[Tensor, "items dim"]
    """mean minus origin of each class, in the row of its origin; 0 in other rows"""
    count: Float[Tensor, "items"]
    """number of items of each class, in the row of its origin; 0 in other rows"""
    embedding_dtype: torch.dtype
    """dtype of the embeddings"""

    @classmethod
    def of(cls, embeddings: Tensor, labels: Tensor, *, normalize: bool) -> BatchScatter:
        """Return the sums of a batch."""
        items = embeddings.float() if embeddings.device.type == "mps" else embeddings.double()
        if normalize:
            items = unit_rows(items)
        origin = _origins(labels)
        count = items.new_zeros(len(items)).index_add_(0, origin, items.new_ones(len(items)))
        from_origin = items - items[origin]  # (items, dim)
        offset = torch.zeros_like(items).index_add_(0, origin, from_origin).div_(count.clamp(min=1).unsqueeze(1))
        return cls(items, from_origin.sub_(offset[origin]), offset, count, embeddings.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the ratios."""
        return torch.promote_types(self.embedding_dtype, torch.float32)

    def discriminant_ratio(self, *, eps: float, skip_singletons: bool) -> Float[Tensor, ""]:
        """Return J; NaN if it is undefined (see the function `discriminant_ratio`)."""
        if self.items.numel() == 0:
            return self.items.new_full((), torch.nan, dtype=self.dtype)
        if skip_singletons:
            # A class of one item has no scatter within, so it must not move the centre either.
            between, within = self._lengths(self.count * (self.count > 1))
        else:
            between, within = self.lengths
        return torch.where(self.count.max() <= 1, torch.nan, _ratio(between, within, eps)).to(self.dtype)

    def variance_ratio(self) -> Float[Tensor, ""]:
        """Return the variance ratio; NaN if it is undefined (see the function `variance_ratio`)."""
        if self.items.numel() == 0:
            return self.items.new_full((), torch.nan, dtype=self.dtype)
        between, within = self.lengths
        items = len(self.items)
        classes = self.count.count_nonzero().to(self.count)  # a float: integers divide to float32
        ratio = estimated_ratio((between / within).square(), items, classes, self.count.square().sum())
        # Not `within != 0`: if a class is 1e300 away, the scatter within may underflow. NaN and Inf still give NaN.
        is_defined = (classes > 1) & (classes < items) & (self.deviations != 0).any()
        return torch.where(is_defined, ratio, torch.nan).to(self.dtype)

    @cached_property
    def lengths(self) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Square roots of the scatter between and within classes, on one scale. Both ratios use them."""
        return self._lengths(self.count)

    def _lengths(self, count: Float[Tensor, "items"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return the same for the classes with `count` > 0."""
        # Means are relative to a class that takes part. Relative to an outlier that does not, they would lose digits.
        reference = count.argmax().view(1)
        means = (self.items - self.items[reference]).add_(self.offset).sub_(self.offset[reference])
        means -= (count / count.sum()) @ means
        means *= count.sqrt().unsqueeze(1)
        deviations = self.deviations
        if (
            self.items.dtype == self.embedding_dtype
        ):  # squares may overflow or underflow; the squares of narrower dtypes cannot
            largest = [torch.linalg.vector_norm(rows, ord=torch.inf) for rows in (deviations, means)]
            scale = torch.stack(largest).max()
            scale = scale.where(scale > 0, 1)
            deviations = deviations / scale
            means = means / scale
        return torch.linalg.vector_norm(means), torch.linalg.vector_norm(deviations)


def _origins(labels: Shaped[Tensor, "items"]) -> Int[Tensor, "items"]:
    """Return the first item of the class of each item, without `unique`, which would wait for the device."""
    if labels.dtype == torch.bool:
        labels = labels.long()
    ordered, order = labels.sort(stable=True)
    first = torch.searchsorted(ordered, ordered)
    return torch.empty_like(order).scatter_(0, order, order[first])


def _ratio(between: Float[Tensor, ""], within: Float[Tensor, ""], eps: float) -> Float[Tensor, ""]:
    """Return J, given the square roots of both scatters; NaN if both are 0."""
    ratio = (between / within).square()
    return 1 / ((1 + eps) / ratio + eps)


def estimated_ratio(traces: Tensor, items: Tensor | float, classes: Tensor | int, squares: Tensor | float) -> Tensor:
    """Return the variance ratio, given Tr(S_B) / Tr(S_W), n, k and sum_c n_c^2 (see variance_ratio.py)."""
    n0 = (items - squares / items) / (classes - 1)
    return (traces * ((items - classes) / (classes - 1)) - 1) / n0


def _lengths(rows: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows"]:
    """Return the Euclidean length along the last dimension, without an overflow or underflow of the squares."""
    if rows.shape[-1] == 0:
        return rows.sum(dim=-1)
    largest = torch.linalg.vector_norm(rows, ord=torch.inf, dim=-1, keepdim=True)
    scaled = rows / largest.where(largest > 0, 1)
    lengths: Tensor = torch.linalg.vector_norm(scaled, dim=-1) * largest.squeeze(-1)
    return lengths


def unit_rows(items: Float[Tensor, "items dim"]) -> Float[Tensor, "items dim"]:
    """Return each row scaled to length 1, however small or large it is; a zero row stays zero."""
    largest = torch.linalg.vector_norm(items, ord=torch.inf, dim=1, keepdim=True)
    scaled = items / largest.where(largest > 0, 1)
    unit_vectors: Tensor = scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True).clamp(min=1)
    return unit_vectors


@dataclass(frozen=True)
class ClassMoments:
    """The moments of a set from which J is computed: the count, the mean and the scatter of each class.

    Moments of disjoint sets can be merged in any order (Chan, Golub and LeVeque, "Updating formulae and a pairwise
    algorithm for computing sample variances", 1979). So J of a set can be computed in one pass over its batches, or from
    the shards of several processes.

    Examples:
        >>> import torch
        >>> embeddings, labels = torch.randn(60, 8), torch.arange(60) % 5
        >>> whole = ClassMoments.of(embeddings, labels)
        >>> parts = ClassMoments.of(embeddings[:13], labels[:13]).merge(ClassMoments.of(embeddings[13:], labels[13:]))
        >>> torch.testing.assert_close(parts.discriminant_ratio(), whole.discriminant_ratio())
    """

    labels: Labels
    """label of each class, as it was passed, ascending, on the CPU"""
    counts: Int[Tensor, "classes"]
    origins: Float[Tensor, "classes dim"]
    """float64; an item of each class. Its mean is stored relative to this item, so that an offset costs no digits"""
    offsets: Float[Tensor, "classes dim"]
    """float64; mean minus origin"""
    spread: Float[Tensor, "classes"]
    """square root of the scatter of each class"""

    @property
    def means(self) -> Float[Tensor, "classes dim"]:
        """The mean of each class, rounded to float64."""
        return self.origins + self.offsets

    @property
    def scatter(self) -> Float[Tensor, "classes"]:
        """Sum of squared distances of the items of each class to its mean."""
        return self.spread.square()

    @classmethod
    def nothing(cls, dim: int) -> ClassMoments:
        """Return the moments of an empty set."""
        return cls.of(torch.empty(0, dim, device="cpu"), torch.empty(0, dtype=torch.int64, device="cpu"))

    @classmethod
    def of(cls, embeddings: Any, labels: Any) -> ClassMoments:
        """Return the moments of one batch, in float64 on its device.

        Args:
            embeddings: (items, dim), any floating dtype.
            labels: (items,) integers of any value, or strings.

        Raises:
            ValueError: If embeddings are not (items, dim), or if labels are not one integer or string per item.
        """
        rows, item_labels = read_batch(embeddings, labels, "ClassMoments.of")
        items = rows.double()
        classes, number = item_labels.distinct()
        number = number.to(items.device)
        counts = number.bincount(minlength=len(classes))
        origins = items[number.sort(stable=True).indices[counts.cumsum(0) - counts]]  # the first item of each class
        from_origin = items - origins[number]
        offsets = torch.zeros_like(origins).index_add_(0, number, from_origin) / counts.unsqueeze(1)
        distances = _lengths(from_origin - offsets[number])
        scale = distances.new_ones(()) if len(distances) == 0 else distances.max()
        squares = (distances / scale.where(scale > 0, 1)).square()
        spread = scale * torch.zeros_like(offsets[:, 0]).index_add_(0, number, squares).sqrt()
        return cls(on_cpu(classes), counts, origins, offsets, spread)

    def merge(self, other: ClassMoments) -> ClassMoments:
        """Return the moments of the union of two disjoint sets; both have integer labels, or both have strings."""
        labels, row = join("ClassMoments.merge", [self.labels, other.labels]).distinct()
        own_rows, other_rows = row.to(self.counts.device).split([len(self.labels), len(other.labels)])

        def placed(values: Tensor, rows: Tensor) -> Tensor:
            return values.new_zeros(len(labels), *values.shape[1:]).index_copy_(0, rows, values)

        counts = placed(self.counts, own_rows)
        other_counts = placed(other.counts, other_rows)
        share = other_counts.double() / (counts + other_counts)
        other_origins = placed(other.origins, other_rows)
        # classes that only the other set has keep its origin
        origins = other_origins.index_copy(0, own_rows, self.origins)
        offsets = placed(self.offsets, own_rows)
        # From the mean of this set to the mean of the other set. If one set has no item of a class, the share is 0 or
        # 1, and the moments of the set that has it do not change.
        step = (other_origins - origins) + (placed(other.offsets, other_rows) - offsets)
        between = _lengths(step) * (share * counts).sqrt()
        spreads = torch.stack([placed(self.spread, own_rows), placed(other.spread, other_rows), between], dim=1)
        return ClassMoments(
            labels=labels,
            counts=counts + other_counts,
            origins=origins,
            offsets=offsets + step * share.unsqueeze(1),
            spread=_lengths(spreads),
        )

    def shared(self, processes: Processes) -> ClassMoments:
        """Return merged moments of all processes, for the classes that this process owns. *Collective*.

        Each class has one owner. A process without items passes moments of the same dimension without classes. The labels of
        the result are codes that all processes agree on.
        """
        [codes], _ = encode("ClassMoments.shared", {"labels": self.labels}, processes)
        coded = replace(self, labels=Labels(codes))
        owner = codes.remainder(processes.count)
        moments = coded._of(owner == processes.rank)
        for step in range(1, processes.count):
            destination = (processes.rank + step) % processes.count
            sender = (processes.rank - step) % processes.count
            leaving = coded._of(owner == destination)
            tensors = [leaving.labels.codes, *leaving.values()]
            received = processes.exchange(tensors, destination=destination, sender=sender)
            assert received is not None
            moments = moments.merge(ClassMoments(Labels(received[0]), *received[1:]))
        return moments

    def _of(self, mask: Bool[Tensor, "classes"]) -> ClassMoments:
        """Return the moments of the classes in a mask."""
        return ClassMoments(self.labels[mask], *(tensor[mask] for tensor in self.values()))

    def values(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return all fields except the labels, in the order of the constructor."""
        return self.counts, self.origins, self.offsets, self.spread

    def discriminant_ratio(
        self, *, eps: float = EPS, skip_singletons: bool = False, processes: Processes = ALONE
    ) -> Float[Tensor, ""]:
        """Return J of the whole set; NaN if it is undefined. *Collective*.

        Args:
            eps: Share of the total scatter that is added to the scatter within classes.
            skip_singletons: Leave out classes with a single item.
            processes: The processes that own the other classes of the set (see `shared`).
        """
        return self.class_scatter(skip_singletons=skip_singletons, processes=processes).discriminant_ratio(eps=eps)

    def class_scatter(self, *, skip_singletons: bool = False, processes: Processes = ALONE) -> ClassScatter:
        """Return the count, the distance to the centre and the spread of each class of all processes. *Collective*.

        Args:
            skip_singletons: Leave out classes with a single item.
            processes: The processes that own the other classes of the set (see `shared`).
        """
        moments = self._of(self.counts > (1 if skip_singletons else 0))
        counts = moments.counts.double()
        total = sum(processes.gather(float(counts.sum())))
        first_classes = processes.gather((moments.origins[:1], moments.offsets[:1]))
        references = [(origin, offset) for origin, offset in first_classes if len(origin)]
        if not references:
            return ClassScatter(counts, counts, counts)
        origin, offset = references[0]
        means = (moments.origins - origin) + (moments.offsets - offset)
        centre = torch.stack(processes.gather((counts / total) @ means)).sum(dim=0)
        scatter = torch.stack([counts, _lengths(means - centre), moments.spread])  # (3, classes of this process)
        return ClassScatter(*torch.cat(processes.gather(scatter), dim=1))


@dataclass(frozen=True)
class ClassScatter:
    """Counts, distances and spread of all classes of a set, for J and the variance ratio; the same in every process."""

    counts: Float[Tensor, "classes"]
    distances: Float[Tensor, "classes"]
    """distance of the mean of each class to the mean of all items"""
    spread: Float[Tensor, "classes"]
    """square root of the scatter of each class"""

    def discriminant_ratio(self, *, eps: float = EPS) -> Float[Tensor, ""]:
        """Return J of the whole set; NaN if it is undefined."""
        if len(self.counts) == 0 or self.counts.max() <= 1:
            return self.counts.new_full((), torch.nan)
        return _ratio(_lengths(self.counts.sqrt() * self.distances), _lengths(self.spread), eps)


def moments_of_set(
    embeddings: Float[Tensor, "items dim"], labels: Labels, *, normalize: bool = False
) -> ClassMoments | None:
    """Return the moments of a whole set, converted to float64 in parts; None without items.

    `normalize` scales each embedding to length 1 first.

    Examples:
        >>> moments = moments_of_set(torch.tensor([[0.0], [2.0], [4.0], [6.0]]), Labels(torch.tensor([0, 0, 1, 1])))
        >>> round(float(moments.discriminant_ratio()), 6)
        4.0
    """
    moments = None
    for start in range(0, len(labels), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        rows = embeddings[part].double()
        moments_of_part = ClassMoments.of(unit_rows(rows) if normalize else rows, labels[part])
        moments = moments_of_part if moments is None else moments.merge(moments_of_part)
    return moments


def ratio_of_set(
    mine: ClassMoments | None, processes: Processes = ALONE, *, eps: float = EPS, skip_singletons: bool = False
) -> tuple[float, ClassScatter]:
    """Return J of the items of all processes, and the scatter of all their classes. *Collective*.

    `mine` has the moments of this process; None without items. `eps` and `skip_singletons` are as in `batch_ratios`.

    Examples:
        >>> moments = ClassMoments.of(torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 2.0], [4.0, 2.0]]), [0, 1, 0, 1])
        >>> round(ratio_of_set(moments)[0], 6)
        4.0
    """
    with processes.together():
        processes.refuse_other_calls("ratio_of_set", {"eps": eps, "skip_singletons": skip_singletons})
        dims_by_rank = processes.gather(None if mine is None else mine.means.shape[1])
        dims = {rank: dim for rank, dim in enumerate(dims_by_rank) if dim is not None}
        if not dims:
            raise InputError("The set is empty: no step gave an embedding.")
        first, dim = next(iter(dims.items()))
        for rank, dim_of_rank in dims.items():
            if dim_of_rank != dim:
                raise InputError(
                    f"ratio_of_set: embeddings have dimension {dim} in process {first}, but {dim_of_rank} in process "
                    f"{rank}. Pass embeddings of the same model in all processes."
                )
        moments = (ClassMoments.nothing(dim) if mine is None else mine).shared(processes)
        scatter = moments.class_scatter(processes=processes)
        scatter_of_j = scatter
        if skip_singletons:
            scatter_of_j = moments.class_scatter(skip_singletons=True, processes=processes)
    if not len(scatter.counts):
        raise InputError("The set is empty: no step gave an embedding.")
    value = float(scatter_of_j.discriminant_ratio(eps=eps))
    if not math.isnan(value):
        return value, scatter
    if scatter.counts.max() == 1:
        raise InputError(
            f"Each of the {len(scatter.counts)} classes has one item, but J compares items of the same class. Validate on a "
            "set with several items per class."
        )
    raise InputError("All embeddings are equal: the model has collapsed.")
