"""The measures of a training step by their definitions, number by number."""

import math

from torch import Tensor

from fewshot_callbacks.functional.dynamics import Centering


def slow_dynamics(before: Tensor, after: Tensor, labels: Tensor, shots: int, centering: Centering) -> dict[str, float]:
    """The definitions, number by number."""
    old, new = before.double().tolist(), after.double().tolist()

    def centred(rows: list[list[float]]) -> list[list[float]]:
        if centering == "coordinates":
            return [[x - math.fsum(row) / len(row) for x in row] for row in rows]
        means = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
        return [[x - m for x, m in zip(row, means, strict=True)] for row in rows]

    def inner(a: list[list[float]], b: list[list[float]]) -> float:
        return math.fsum(x * y for r, s in zip(a, b, strict=True) for x, y in zip(r, s, strict=True))

    def minus(a: list[list[float]], b: list[list[float]], scale: float) -> list[list[float]]:
        return [[x - scale * y for x, y in zip(r, s, strict=True)] for r, s in zip(a, b, strict=True)]

    x_old, x_new = centred(old), centred(new)
    alpha = inner(x_old, x_new) / inner(x_old, x_old)
    apart, moved = minus(x_new, x_old, alpha), minus(x_new, x_old, 1.0)
    phi = math.sqrt(inner(apart, apart)) / math.sqrt(inner(moved, moved))

    members: dict[int, list[int]] = {}
    for row, label in enumerate(labels.tolist()):
        members.setdefault(label, []).append(row)

    def distance(rows: list[list[float]], query: int, label: int) -> float:
        support = [rows[row] for row in members[label][:shots]]
        prototype = [math.fsum(column) / shots for column in zip(*support, strict=True)]
        return math.sqrt(math.dist(rows[query], prototype) ** 2 + 1e-10)

    logs: dict[bool, list[float]] = {True: [], False: []}
    for own, rows in members.items():
        for query in rows[shots:]:
            for label in members:
                logs[own == label].append(math.log(distance(new, query, label) / distance(old, query, label)))
    con, div = (math.exp(math.fsum(logs[same]) / len(logs[same])) for same in (True, False))
    return {
        "alpha": alpha, "norm_ratio": phi, "psi_con": con, "psi_div": div,
        "con_alpha": con / alpha, "div_alpha": div / alpha, "con_div": con / div,
    }  # fmt: skip
