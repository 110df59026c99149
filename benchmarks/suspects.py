"""How many flipped labels `suspects` finds, compared with cleanlab on the votes of the same neighbours.

    python benchmarks/suspects.py                                # three sets, 1, 5 and 10 % of the labels, ten seeds
    python benchmarks/suspects.py --flips close --shares 0.05    # flipped to one of the three most similar classes
    python benchmarks/suspects.py --small                        # classes of two to five items, and very uneven ones

The sets are scikit-learn's digits as pixels (1,797 items, 10 classes), and the glyphs of the test and validation scripts as
64 principal components of their pixels (2,892 and 3,496 items, classes of up to 16). Each seed flips other labels. Precision
and recall are computed on the list that a method returns; average precision is computed on its ranking of all items and
needs no threshold. cleanlab (Northcutt, Jiang and Chuang 2021) gets the vote fractions of the same neighbours as
out-of-sample probabilities, as its Datalab does with features. It runs `find_label_issues` with its default filter and with
"both", ordered by the label quality score of self-confidence or of the normalised margin. If no neighbour of an item has its
label, its self-confidence is zero, and such items tie; "no zeros" raises zeros to 1e-9 and normalises, which orders the ties
by the number of classes in the votes. Cells are means over seeds with the half width of a 95 % interval (Student's t).
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch
from cleanlab.filter import find_label_issues
from cleanlab.rank import get_label_quality_scores
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import t as student
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.metrics import average_precision_score

from fewshot_callbacks import Glyphs, nearest, suspects

Set = tuple[str, NDArray[np.float64], NDArray[np.int64]]
Method = Callable[[NDArray[np.float64], NDArray[np.int64], int], tuple[NDArray[np.bool_], NDArray[np.float64]]]
"""vectors, labels and k -> the returned items, and the suspicion of each item"""


def sets(small: bool) -> Iterator[Set]:
    digits = load_digits()
    names = [("digits", digits.data, digits.target)]
    for split in ("test", "val"):
        glyphs = Glyphs(split)
        pixels = glyphs.images.flatten(1).numpy() / 255.0
        names.append((f"glyphs, {split}", PCA(64, random_state=0).fit_transform(pixels), glyphs.labels.numpy()))
    for name, vectors, labels in names:
        kept = np.arange(len(labels))
        if small:
            uneven = (5, 10, 20, 40, 60, 80, 100, 120, 150, 170)
            of_class = [uneven[label] if name == "digits" else 2 + label % 4 for label in range(labels.max() + 1)]
            kept = np.concatenate([np.flatnonzero(labels == label)[:size] for label, size in enumerate(of_class)])
        yield name, vectors[kept], labels[kept]


def flipped(
    vectors: NDArray[np.float64], labels: NDArray[np.int64], share: float, close: bool, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return labels with a fraction of wrong ones, and which labels are wrong."""
    rng, classes = np.random.default_rng(seed), int(labels.max()) + 1
    wrong = rng.permutation(len(labels))[: max(1, round(share * len(labels)))]
    given = labels.copy()
    if close:
        means = torch.stack([torch.from_numpy(vectors[labels == label].mean(axis=0)) for label in range(classes)])
        neighbours = nearest(means, k=3).indices.numpy()
        given[wrong] = neighbours[labels[wrong], rng.integers(0, 3, len(wrong))]
    else:
        given[wrong] = (given[wrong] + rng.integers(1, classes, len(wrong))) % classes
    is_wrong = np.zeros(len(labels), bool)
    is_wrong[wrong] = True
    return given, is_wrong


def ours(
    vectors: NDArray[np.float64], labels: NDArray[np.int64], k: int
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    found = suspects(vectors, labels, k=k, min_probability=0.0)
    order = np.full(len(labels), -np.inf)
    order[found.index.numpy()] = found.log_odds.numpy()
    return order >= 0, np.maximum(order, -1e9)


def cleanlab(filter_by: str, score: str, least: float = 0.0) -> Method:
    def find(
        vectors: NDArray[np.float64], labels: NDArray[np.int64], k: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        present, given = np.unique(labels, return_inverse=True)  # it needs labels without gaps
        votes = given[nearest(vectors, k=k).indices.numpy()]
        probabilities = np.stack([(votes == label).mean(axis=1) for label in range(len(present))], axis=1)
        if least:
            probabilities = np.maximum(probabilities, least)
            probabilities /= probabilities.sum(axis=1, keepdims=True)
        issues = find_label_issues(given, probabilities, filter_by=filter_by, n_jobs=1)
        return issues, -get_label_quality_scores(given, probabilities, method=score)

    return find


METHODS: dict[str, Method] = {
    "suspects": ours,
    "cleanlab, self-confidence": cleanlab("prune_by_noise_rate", "self_confidence"),
    "the same, no zeros": cleanlab("prune_by_noise_rate", "self_confidence", least=1e-9),
    "cleanlab, both, margin": cleanlab("both", "normalized_margin"),
}


def cell(values: list[float]) -> str:
    half = (
        student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
        if len(values) > 1
        else np.nan
    )
    return f"{np.mean(values):.3f} ±{half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.01, 0.05, 0.1], help="of the labels that are flipped"
    )
    parser.add_argument(
        "--flips", choices=["random", "close"], default="random", help="to any class, or to a similar one"
    )
    parser.add_argument(
        "--small", action="store_true", help="keep two to five items per class (5 to 170 for the digits)"
    )
    parser.add_argument("--seeds", type=int, default=10, help="draws of the flipped labels (default: %(default)s)")
    parser.add_argument("--k", type=int, default=10, help="neighbours that vote (default: %(default)s)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="May not flag all label issues")  # for each of many small classes
    table = Table("set", "flipped", "method", "precision", "recall", "average precision")
    for name, vectors, labels in sets(options.small):
        for share in options.shares:
            found: dict[str, list[tuple[float, float, float]]] = {}
            for seed in track(range(options.seeds), f"{name}, {share:.0%}", transient=True):
                given, wrong = flipped(vectors, labels, share, options.flips == "close", seed)
                for method, find in METHODS.items():
                    returned, order = find(vectors, given, options.k)
                    hits = int((returned & wrong).sum())
                    found.setdefault(method, []).append(
                        (hits / max(1, int(returned.sum())), hits / wrong.sum(), average_precision_score(wrong, order))
                    )
            for place, (method, values) in enumerate(found.items()):
                of_set = (f"{name} ({len(labels):,})", f"{share:.0%}") if place == 0 else ("", "")
                table.add_row(*of_set, method, *(cell(list(column)) for column in zip(*values, strict=True)))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
