"""Small sets, and a call of each function of the table `TAKES` with them."""

import inspect
import re

import numpy as np
import torch

from fewshot_callbacks import functional
from fewshot_callbacks.functional.item_reader import TAKES
from tests.reports import comparable_values

# What a function needs so that these small sets have a result.
OPTIONS = {
    "evaluate_retrieval": {"label_groups": 3},
    "grouped_recall": {"label_groups": 3},
    "leakage": {"min_score": 0.9},
    "near_duplicates": {"min_score": 0.5},
    "embedding_health": {"k": 3},
    "suspects": {"k": 5, "min_probability": 0.0},
}


def items(count, seed):
    """Rows that tie and repeat, with the columns of a set."""
    generator = np.random.default_rng(seed)
    rows = generator.integers(-2, 3, (count, 4)).astype(np.float32)
    rows[:, 0] += 3
    labels = np.arange(count) % 6
    # Ids repeat with their row and label.
    ids = np.arange(count)
    ids[-4:], rows[-4:], labels[-4:] = ids[:4], rows[:4], labels[:4]
    return {"rows": rows, "labels": labels, "ids": ids + 1000 * seed, "groups": ids // 2 % 7}


QUERIES, GALLERY = items(40, 1), items(50, 2)
OPTIONS["leakage"]["report"] = functional.evaluate_retrieval(
    QUERIES["rows"], QUERIES["labels"], query_ids=QUERIES["ids"], label_groups=None
)


def columns_of(name):
    """The columns that a function has arguments for."""
    kinds = ("labels", "ids", "groups")
    return [kind for kind in kinds if TAKES[name].argument(f"query_{kind}") in parameters(name)]


def parameters(name):
    return inspect.signature(getattr(functional, name)).parameters


def found_lists(name, queries, gallery=None):
    """For the function that takes them: three items for each query, whatever other queries there are."""
    if "found" not in parameters(name):
        return {}
    items = queries if gallery is None else gallery
    first = items["ids"].min() // 1000 * 1000 if "ids" in items else 0
    numbers = queries.get("ids", np.arange(len(queries["rows"])))
    return {"found": first + numbers[:, None] * [1, 3, 7] % 36}


def arguments(name, queries, gallery=None):
    """Sets as the arguments of a function."""
    takes = TAKES[name]
    given = {takes.argument("queries"): queries["rows"], **found_lists(name, queries, gallery)}
    given |= {takes.argument(f"query_{kind}"): queries[kind] for kind in columns_of(name) if kind in queries}
    if gallery is not None:
        given[takes.argument("gallery")] = gallery["rows"]
        given |= {takes.argument(f"gallery_{kind}"): gallery[kind] for kind in columns_of(name) if kind in gallery}
    return given


def call(name, given, **options):
    return getattr(functional, name)(**given, **OPTIONS.get(name, {}), **options)


def comparable(value):
    """A result as text, to the last bit; to nine digits where processes add up sums in another order."""
    if isinstance(value, functional.ProbeReport | functional.EmbeddingHealth):
        values = {name: getattr(value, name) for name in value.__dataclass_fields__}
        return re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.9g}", repr(values))
    if isinstance(value, functional.RetrievalReport):
        return comparable_values(value)[0]
    if hasattr(value, "__dataclass_fields__"):
        return {name: comparable(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist().__repr__()
    if isinstance(value, dict):
        return {key: comparable(entry) for key, entry in value.items()}
    return repr(value)
