"""Closed-form ridge regression, with exact predictions for left-out items without a second fit.

With n items, their centred embeddings X (n, dim) and targets Y (n, columns), X'X = V L V', Z = XV and B = Z'Y:

| | |
| --- | --- |
| coefficients at a penalty a | V (L + a)^-1 B |
| hat matrix | H = 1/n + Z (L + a)^-1 Z' |
| residuals of the fit | R = Y - Z (L + a)^-1 B |
| residuals of items G in the fit without them | (I - H_GG)^-1 R_G |

The intercept is not penalised. One eigendecomposition serves all penalties. The last row is exact, for one item (Allen, "The
relationship between variable selection and data augmentation", Technometrics 16, 1974) and for a group (Cook and Weisberg,
"Residuals and influence in regression", 1982). Eigenvalues, axes and B come from moments, which are summed over processes.
The hat matrix needs one more pass over the items of each process.

If L has rank n - 1, a fit without a penalty has no residuals. With a small penalty, R and I - H are small differences of
large numbers. Both can be computed without a difference: R = Z W B and I - H = Z W Z' with W = a (L (L + a))^-1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.storage.stored_rows import StoredRows

# Number of float64 values per block of items: 8 MB. Larger products are not faster.
BLOCK_NUMBERS = 2**20
# Eigenvalues below this fraction of the largest are rounding errors: the precision is about 1e-16 of the largest.
SMALLEST_SHARE = 1e-12

Selection = slice | Int[Tensor, "chosen"]


class Targets(ABC):
    """The targets for the items of this process: `columns` numbers per item."""

    columns: int

    @abstractmethod
    def sums(self) -> Float[Tensor, "columns"]:
        """Return the sum of each column over the items of this process."""

    @abstractmethod
    def centred(self, items: Selection, mean: Float[Tensor, "columns"]) -> Float[Tensor, "chosen columns"]:
        """Return the targets of these items, minus the mean of each column."""

    @abstractmethod
    def add_products(
        self, products: Float[Tensor, "dim columns"], rows: Float[Tensor, "chosen dim"], items: Selection
    ) -> None:
        """Add X'Y of these items to `products`.

        `rows` are the centred embeddings of these items.
        """

    def squares_outside(self, items: Selection) -> Float[Tensor, "chosen"] | float:
        """Return the squared residuals outside the columns, which do not depend on the penalty."""
        del items
        return 0.0


class ClassTargets(Targets):
    """One column per class: 1 for its items and -1 for all others."""

    def __init__(self, classes: Int[Tensor, "items"], columns: int) -> None:
        self.classes = classes
        self.columns = columns

    def sums(self) -> Float[Tensor, "columns"]:
        """Return the sum of each column over the items of this process."""
        sizes = torch.bincount(self.classes, minlength=self.columns).double()
        return 2 * sizes - len(self.classes)

    def centred(self, items: Selection, mean: Float[Tensor, "columns"]) -> Float[Tensor, "chosen columns"]:
        """Return the targets of these items, minus the mean of each column."""
        classes = self.classes[items]
        targets = (-1 - mean).repeat(len(classes), 1)
        targets[torch.arange(len(classes)), classes] += 2
        return targets

    def add_products(
        self, products: Float[Tensor, "dim columns"], rows: Float[Tensor, "chosen dim"], items: Selection
    ) -> None:
        """Add X'Y of these items to `products`.

        The rows of all processes sum to zero, so the -1 of other classes adds nothing, and twice the sum of each class
        remains. An item takes dim operations instead of dim times columns.
        """
        products.T.index_add_(0, self.classes[items], rows, alpha=2.0)


class NumberTargets(Targets):
    """Columns of numbers."""

    def __init__(self, values: Float[Tensor, "items columns"]) -> None:
        self.values = values
        self.columns = values.shape[1]

    def sums(self) -> Float[Tensor, "columns"]:
        """Return the sum of each column over the items of this process."""
        return self.values.sum(dim=0)

    def centred(self, items: Selection, mean: Float[Tensor, "columns"]) -> Float[Tensor, "chosen columns"]:
        """Return the targets of these items, minus the mean of each column."""
        return self.values[items] - mean

    def add_products(
        self, products: Float[Tensor, "dim columns"], rows: Float[Tensor, "chosen dim"], items: Selection
    ) -> None:
        """Add X'Y of these items to `products`. Rows that sum to zero need no centred targets."""
        products.addmm_(rows.T, self.values[items])


class RotatedTargets:
    """Centred class targets in an orthonormal basis of the predictions, if there are more classes than directions.

    All predictions are in the space of this basis. The squared residual of an item is the residual inside the space, in
    fewer columns, plus the squared length of its target outside the space, which does not depend on the penalty.

    `table` has the centred target of each class in the basis, and `outside` the squared length of its remainder.
    """

    def __init__(
        self,
        classes: Int[Tensor, "items"],
        table: Float[Tensor, "classes columns"],
        outside: Float[Tensor, "classes"],
    ) -> None:
        self.classes = classes
        self.table = table
        self.outside = outside

    @classmethod
    def of(cls, targets: ClassTargets, ridge: Ridge) -> tuple[RotatedTargets, Ridge]:
        """Return the rotated targets, and the ridge regression that predicts them."""
        basis, triangle = torch.linalg.qr(ridge.products.T)  # (classes, rank), (rank, rank)
        shares = (1 + ridge.target_mean) / 2  # of the items in each class
        table = 2 * (basis - shares @ basis)
        squares = 4 * (1 - 2 * shares + shares @ shares)
        outside = (squares - table.square().sum(dim=1)).clamp(min=0)
        mean = torch.zeros(table.shape[1], dtype=torch.float64)
        return cls(targets.classes, table, outside), replace(ridge, products=triangle.T, target_mean=mean)

    def centred(self, items: Selection, mean: Float[Tensor, "columns"]) -> Float[Tensor, "chosen columns"]:
        """Return the targets of these items, minus the mean of each column."""
        return self.table[self.classes[items]] - mean

    def squares_outside(self, items: Selection) -> Float[Tensor, "chosen"]:
        """Return the squared length of the targets outside the basis."""
        return self.outside[self.classes[items]]


@dataclass(frozen=True, eq=False)
class TrainingItems:
    """The items of this process that the regression is fitted on."""

    rows: Float[Tensor, "items dim"] | StoredRows
    targets: Targets

    @property
    def widest(self) -> int:
        """Numbers per item in the widest matrix of a block."""
        return max(self.rows.shape[1], self.targets.columns)

    def blocks(self) -> list[slice]:
        """Return the blocks of items."""
        return blocks_of(len(self.rows), self.widest)


def blocks_of(items: int, width: int) -> list[slice]:
    """Return blocks of at most `BLOCK_NUMBERS` numbers, with `width` numbers per item."""
    step = max(1, BLOCK_NUMBERS // width)
    return [slice(first, min(items, first + step)) for first in range(0, items, step)]


@dataclass(frozen=True, eq=False)
class Ridge:
    """The ridge regressions with all penalties on one set of items (see the module docstring).

    Embeddings are divided by `scale`, a power of two, so that no square overflows. Penalties and eigenvalues are
    for the divided embeddings.
    """

    items: int
    """number of items of all processes"""
    scale: float
    centre: Float[Tensor, "dim"]
    """mean of the divided embeddings"""
    axes: Float[Tensor, "dim rank"]
    """V, for the eigenvalues that are more than rounding"""
    eigenvalues: Float[Tensor, "rank"]
    """L, ascending"""
    target_mean: Float[Tensor, "columns"]
    products: Float[Tensor, "rank columns"]
    """B"""

    @property
    def rank(self) -> int:
        """Number of directions in which the items differ."""
        return len(self.eigenvalues)

    @property
    def mean_eigenvalue(self) -> float:
        """Mean eigenvalue of these directions; 0 if all items are equal."""
        return float(self.eigenvalues.mean()) if self.rank else 0.0

    @property
    def interpolates(self) -> bool:
        """Whether a fit without a penalty has no residuals."""
        return self.rank == self.items - 1

    def predictions(self, rows: Float[Tensor, "chosen dim"], penalty: float) -> Float[Tensor, "chosen columns"]:
        """Return the predictions for other items."""
        coefficients = self.axes @ (self.products / (self.eigenvalues + penalty)[:, None])
        return torch.addmm(self.target_mean, rows.double() / self.scale - self.centre, coefficients)

    def projected(self, rows: Float[Tensor, "chosen dim"]) -> Float[Tensor, "chosen rank"]:
        """Return Z of these items."""
        return (rows.double() / self.scale - self.centre) @ self.axes

    def residuals(
        self, projected: Float[Tensor, "chosen rank"], targets: Float[Tensor, "chosen columns"], penalty: float
    ) -> Float[Tensor, "chosen columns"]:
        """Return the residuals of items in the fit, given their Z and centred targets."""
        weighted = projected * self._weights(penalty)
        if self.interpolates:
            return weighted @ self.products
        return torch.addmm(targets, weighted, self.products, alpha=-1)

    def complements(
        self, projected: Float[Tensor, "chosen rank"], penalties: Sequence[float]
    ) -> Float[Tensor, "chosen penalties"]:
        """Return the diagonal of I - H at each penalty."""
        weights = torch.stack([self._weights(penalty) for penalty in penalties], dim=1)
        forms = projected.square() @ weights
        return forms if self.interpolates else 1 - 1 / self.items - forms

    def complement_matrices(
        self, projected: Float[Tensor, "groups size rank"], penalty: float
    ) -> Float[Tensor, "groups size size"]:
        """Return I - H for the items of each group."""
        forms = (projected * self._weights(penalty)) @ projected.mT
        if self.interpolates:
            return forms
        return torch.eye(projected.shape[1], dtype=torch.float64) - 1 / self.items - forms

    def _weights(self, penalty: float) -> Float[Tensor, "rank"]:
        """Return (L + a)^-1, or W if the regression interpolates."""
        if self.interpolates:
            return penalty / (self.eigenvalues * (self.eigenvalues + penalty))
        return 1 / (self.eigenvalues + penalty)


def fit_ridge(items: TrainingItems, processes: Processes) -> Ridge:
    """Return the ridge regressions on the items of all processes, at least two items. *Collective*.

    Processes exchange sums of dim + columns numbers, then of dim^2 + dim columns.
    """
    scale, origin = _scale_and_origin(items, processes)
    offsets = torch.zeros_like(origin)
    for block in items.blocks():
        offsets += (items.rows[block].double() / scale - origin).sum(dim=0)
    count, offsets, target_sums = summed(
        [torch.tensor(float(len(items.rows)), dtype=torch.float64), offsets, items.targets.sums()], processes
    )
    centre = origin + offsets / count
    scatter = torch.zeros(len(centre), len(centre), dtype=torch.float64)
    products = torch.zeros(len(centre), items.targets.columns, dtype=torch.float64)
    for block in items.blocks():
        centred = items.rows[block].double() / scale - centre
        scatter.addmm_(centred.T, centred)
        items.targets.add_products(products, centred, block)
    scatter, products = summed([scatter, products], processes)
    eigenvalues, axes = torch.linalg.eigh(scatter)
    is_seen = eigenvalues > SMALLEST_SHARE * eigenvalues.max().clamp(min=0)
    axes = axes[:, is_seen]
    target_mean = target_sums / count
    return Ridge(int(count), scale, centre, axes, eigenvalues[is_seen], target_mean, axes.T @ products)


def _scale_and_origin(items: TrainingItems, processes: Processes) -> tuple[float, Float[Tensor, "dim"]]:
    """Return a power of two near the largest number, and an item divided by it. *Collective*.

    Means are relative to this item, so equal items and constant dimensions have a scatter of exactly zero.
    """
    largest = 0.0
    for block in items.blocks():
        lowest, highest = items.rows[block].aminmax()
        largest = max(largest, abs(float(lowest)), abs(float(highest)))
    everyone = processes.gather((largest, items.rows[:1].double()))
    # The power below the number, because 2^1024 would overflow.
    scale = math.ldexp(1.0, math.frexp(max(number for number, _ in everyone))[1] - 1)
    origin = torch.cat([first for _, first in everyone])[0]
    return scale, origin / scale


def summed(values: Sequence[Tensor], processes: Processes) -> list[Tensor]:
    """Return the sums over all processes, added in rank order, so that all get the same bits. *Collective*."""
    everyone = processes.gather(list(values))
    return [torch.stack(of_processes).sum(dim=0) for of_processes in zip(*everyone, strict=True)]


# ------------------------------------------------------------------------------------------------------- items left out


class LeaveOneOut:
    """Predicts each item by the fit without it."""

    def __init__(self, ridge: Ridge, items: TrainingItems) -> None:
        self._ridge = ridge
        self._items = items

    def squared_errors(self, penalties: Sequence[float]) -> Float[Tensor, "penalties"]:
        """Return the sum of squared errors at each penalty, over this process's items and all columns."""
        ridge = self._ridge
        targets: Targets | RotatedTargets = self._items.targets
        # Squares outside the basis are differences, which would cancel if residuals are small.
        if isinstance(targets, ClassTargets) and targets.columns > ridge.rank and not ridge.interpolates:
            targets, ridge = RotatedTargets.of(targets, ridge)
        total = torch.zeros(len(penalties), dtype=torch.float64)
        for block in self._items.blocks():
            projected = ridge.projected(self._items.rows[block])
            centred = targets.centred(block, ridge.target_mean)
            complements = ridge.complements(projected, penalties)
            for number, penalty in enumerate(penalties):
                residuals = ridge.residuals(projected, centred, penalty)
                squares = torch.linalg.vector_norm(residuals, dim=1).square() + targets.squares_outside(block)
                total[number] += (squares / complements[:, number].square()).sum()
        return total

    def predictions(self, penalty: float) -> Iterator[tuple[Selection, Float[Tensor, "chosen columns"]]]:
        """Yield blocks of this process's items with their predictions."""
        ridge = self._ridge
        for block in self._items.blocks():
            projected = ridge.projected(self._items.rows[block])
            centred = self._items.targets.centred(block, ridge.target_mean)
            residuals = ridge.residuals(projected, centred, penalty)
            yield block, centred + ridge.target_mean - residuals / ridge.complements(projected, [penalty])


class LeaveGroupOut:
    """Predicts each item by the fit without its group. All items of a group are in one process.

    The embeddings and targets of a block are in memory at the same time, and a block has at least one whole group.
    """

    def __init__(self, ridge: Ridge, items: TrainingItems, groups: Int[Tensor, "items"]) -> None:
        self._ridge = ridge
        self._items = items
        self._blocks = _blocks_of_equal_groups(groups, items.widest)

    def squared_errors(self, penalties: Sequence[float]) -> Float[Tensor, "penalties"]:
        """Return the sum of squared errors at each penalty, over this process's items and all columns."""
        total = torch.zeros(len(penalties), dtype=torch.float64)
        for block in self._blocks:
            projected, centred = self._projected_and_centred(block)
            for number, penalty in enumerate(penalties):
                residuals = self._residuals(projected, centred, penalty, len(block))
                total[number] += residuals.square().sum()
        return total

    def predictions(self, penalty: float) -> Iterator[tuple[Selection, Float[Tensor, "chosen columns"]]]:
        """Yield blocks of this process's items with their predictions."""
        for block in self._blocks:
            projected, centred = self._projected_and_centred(block)
            residuals = self._residuals(projected, centred, penalty, len(block))
            yield block.flatten(), centred + self._ridge.target_mean - residuals

    def _projected_and_centred(
        self, block: Int[Tensor, "groups size"]
    ) -> tuple[Float[Tensor, "chosen rank"], Float[Tensor, "chosen columns"]]:
        """Return Z and the centred targets of a block, one group after the other."""
        items = block.flatten()
        centred = self._items.targets.centred(items, self._ridge.target_mean)
        return self._ridge.projected(self._items.rows[items]), centred

    def _residuals(
        self,
        projected: Float[Tensor, "chosen rank"],
        centred: Float[Tensor, "chosen columns"],
        penalty: float,
        groups: int,
    ) -> Float[Tensor, "chosen columns"]:
        """Return the residuals of items in the fits without their groups, which have equal sizes."""
        residuals = self._ridge.residuals(projected, centred, penalty).reshape(groups, -1, centred.shape[1])
        by_group = projected.reshape(groups, residuals.shape[1], projected.shape[1])  # equal rows give no column
        if by_group.shape[1] <= self._ridge.rank:
            left_out: Tensor = torch.linalg.solve(self._ridge.complement_matrices(by_group, penalty), residuals)
        else:
            left_out = self._residuals_of_large_groups(by_group, residuals, penalty)
        return left_out.reshape(centred.shape)

    def _residuals_of_large_groups(
        self,
        projected: Float[Tensor, "groups size rank"],
        residuals: Float[Tensor, "groups size columns"],
        penalty: float,
    ) -> Float[Tensor, "groups size columns"]:
        """Return the residuals in the fits without each group, from the moments of the other items.

        With A = (1, Z_G) and K = diag(n, L + a), H_GG is A K^-1 A', and (I - H_GG)^-1 R is R + A (K - A'A)^-1 A'R
        (Woodbury). The systems have rank + 1 unknowns instead of one per item of the group.
        """
        ridge = self._ridge
        items = torch.tensor([float(ridge.items)], dtype=torch.float64)
        moments = torch.cat([items, ridge.eigenvalues + penalty]).diag()
        augmented = torch.nn.functional.pad(projected, (1, 0), value=1.0)
        remaining = moments - augmented.mT @ augmented
        correction: Tensor = augmented @ torch.linalg.solve(remaining, augmented.mT @ residuals)
        return residuals + correction


def _blocks_of_equal_groups(groups: Int[Tensor, "items"], width: int) -> list[Int[Tensor, "groups size"]]:
    """Return blocks of groups of equal size, with one row per group."""
    order = groups.argsort(stable=True)
    sizes = groups[order].unique_consecutive(return_counts=True)[1]
    first = sizes.cumsum(dim=0) - sizes
    blocks: list[Tensor] = []
    for size in sizes.unique().tolist():
        positions = first[sizes == size][:, None] + torch.arange(size)
        blocks += [order[positions[chosen]] for chosen in blocks_of(len(positions), size * width)]
    return blocks


def bring_groups_together(
    columns: Sequence[Tensor], groups: Int[Tensor, "items"], processes: Processes
) -> tuple[list[Tensor], Int[Tensor, "received"]]:
    """Return the items of whole groups, after all items of a group were sent to one process. *Collective*.

    Each column has one entry per item. The result is the columns and groups of the items that this process receives.
    """
    if processes.count == 1:
        return list(columns), groups
    holders = _holders(groups, processes)
    tensors = [*columns, groups]
    parts = [[tensor[holders == processes.rank] for tensor in tensors]]
    for step in range(1, processes.count):
        destination = (processes.rank + step) % processes.count
        sender = (processes.rank - step) % processes.count
        is_sent = holders == destination
        sent = [tensor[is_sent] for tensor in tensors] if bool(is_sent.any()) else None
        received = processes.exchange(sent, destination, sender)
        if received is not None:
            parts.append(received)
    *joined, joined_groups = [torch.cat(part) for part in zip(*parts, strict=True)]
    return joined, joined_groups


def _holders(groups: Int[Tensor, "items"], processes: Processes) -> Int[Tensor, "items"]:
    """Return the rank of the process that receives each item's group. *Collective*.

    Groups are assigned in order, so that processes have about equally many items.
    """
    groups_and_sizes = processes.gather(groups.unique(return_counts=True))
    all_groups, number = torch.cat([distinct for distinct, _ in groups_and_sizes]).unique(return_inverse=True)
    sizes = torch.zeros(len(all_groups), dtype=torch.int64)
    sizes.index_add_(0, number, torch.cat([sizes_of_process for _, sizes_of_process in groups_and_sizes]))
    items_before = sizes.cumsum(dim=0) - sizes
    holder_of_group = items_before * processes.count // sizes.sum()
    return holder_of_group[torch.searchsorted(all_groups, groups)]
