"""Drop-in evaluators for other libraries: exact values, with the arguments and metric names of these libraries.

A library is imported when you access the name of its evaluator.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fewshot_callbacks.integrations.pytorch_metric_learning import (
        ExactAccuracyCalculator as ExactAccuracyCalculator,
    )
    from fewshot_callbacks.integrations.sentence_transformers import ExactRetrievalEvaluator as ExactRetrievalEvaluator
    from fewshot_callbacks.integrations.transformers import BatchRetrievalMetrics as BatchRetrievalMetrics

__all__ = ["BatchRetrievalMetrics", "ExactAccuracyCalculator", "ExactRetrievalEvaluator"]

# Name -> the library, which is also the name of its module.
_LIBRARIES = {
    "BatchRetrievalMetrics": "transformers",
    "ExactAccuracyCalculator": "pytorch_metric_learning",
    "ExactRetrievalEvaluator": "sentence_transformers",
}


def __getattr__(name: str) -> Any:
    if name not in _LIBRARIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    library = _LIBRARIES[name]
    try:
        module = import_module(f"{__name__}.{library}")
    except ModuleNotFoundError as missing:
        if missing.name != library:
            raise
        distribution = library.replace("_", "-")
        raise ModuleNotFoundError(
            f"{__name__}.{name} needs {distribution}, but it is not installed. Run pip install {distribution}.",
            name=library,
        ) from missing
    return getattr(module, name)
