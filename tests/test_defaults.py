"""What a user gets who sets nothing. A changed default changes results unasked: it belongs in the changelog."""

import inspect
from typing import Any

import pytest

import fewshot_callbacks
from fewshot_callbacks import functional
from fewshot_callbacks.functional.retrieval.settings import RetrievalSettings

RETRIEVAL = {
    "similarity": "cosine",
    "metrics": (
        "mAP", "map@r", "r_precision", "mrr", "recall@1", "recall@5", "recall@10", "grouped_recall@1",
        "pair_precision", "pair_recall", "pair_f1", "pair_threshold", "recall@precision0.95",
    ),
    "threshold": None, "threshold_bounds": None, "label_groups": "auto", "ties": "expected", "query_ids": None,
    "gallery_ids": None, "query_groups": None, "gallery_groups": None, "max_queries": None, "seed": 0,
    "confidence": 0.95, "memory_mb": None, "device": "cpu",
}  # fmt: skip
"""Of every function and callback that has a setting of that name."""

OTHERS = {
    "grouped_recall": {"k": 1, "unmatched": "exclude", "repeats": 1},
    "label_groups": {"seed": 0, "repeats": 1},
    "class_subset": {"seed": 0},
    "plan_evaluation": {"relevant": 64},
    "discriminant_ratio": {"eps": 1e-30, "normalize": False, "skip_singletons": False},
    "variance_ratio": {"normalize": False},
    "variance_ratio_of_set": {"normalize": False, "confidence": 0.95},
    "sample_episodes": {"ways": 5, "shots": 1, "queries": 15, "episodes": 600, "seed": 0},
    "EpisodeProtocol": {"ways": 5, "shots": 1, "queries": 15, "episodes": 600, "seed": 0},
    "summarize_accuracies": {"batch_statistics": False},
    "training_dynamics": {"episodes": 1},
    "DiscriminantRatioMonitor": {
        "every_n_steps": 1, "normalize": False, "skip_singletons": False, "eps": 1e-30, "prog_bar": True, "strict": None,
    },
    "embedding_health": {"k": 10, "normalize": False},
    "EmbeddingHealthMonitor": {"every_n_steps": 50, "k": None, "normalize": False, "strict": None},
    "GeneralizationGapMonitor": {
        "val_loader": 0, "classes": 100, "items_per_class": None, "every_n_epochs": 1, "max_share": 0.1,
        "prefix": "gap", "strict": None, "metrics": ("grouped_recall@1", "recall@1"), "seed": 0,
    },
    "RetrievalMonitor": {"prog_bar": True, "strict": None, "name": None, "gallery": None},
    "EmbeddingModule": {
        "in_channels": 3, "micro_batch": None, "ap_every_n_steps": 50, "learning_rate": 1e-3, "optimizer": None,
        "scheduler": None,
    },
    "ClassBalancedBatchSampler": {"batches": None, "seed": 0, "epoch": 0},
    "SoftAveragePrecisionLoss": {"bins": None, "low": 0.0, "high": 1.0, "on_empty": "raise"},
    "BinaryCodes": {"temperature": 1.0},
    "TrainingDynamicsMonitor": {"every_n_steps": 100, "strict": None},
}  # fmt: skip


def defaults(name: str) -> dict[str, Any]:
    thing = getattr(functional, name, None) or getattr(fewshot_callbacks, name)
    if not callable(thing):
        return {}
    parameters = inspect.signature(thing).parameters.values()
    return {entry.name: entry.default for entry in parameters if entry.default is not inspect.Parameter.empty}


@pytest.mark.parametrize("name", ["evaluate_retrieval", "grouped_recall", *OTHERS])
def test_what_is_not_set(name: str) -> None:
    found, wanted = defaults(name), OTHERS.get(name, {})
    known = RETRIEVAL | wanted
    assert {key: value for key, value in found.items() if key in known} == {
        key: known[key] for key in known if key in found
    }
    assert wanted.keys() <= found.keys()


def test_evaluate_retrieval_and_its_settings_have_all_of_them() -> None:
    assert RETRIEVAL.keys() <= defaults("evaluate_retrieval").keys()
    fields = inspect.signature(RetrievalSettings).parameters
    assert {name: field.default for name, field in fields.items()} == {name: RETRIEVAL[name] for name in fields}
