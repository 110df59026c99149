"""A library is imported when one of its evaluators is asked for; if it is not installed, one sentence says so."""

import subprocess
import sys

import pytest

from fewshot_callbacks import integrations

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, *_):
        if name in ("pytorch_metric_learning", "sentence_transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import fewshot_callbacks.integrations as integrations
integrations.BatchRetrievalMetrics()
assert "lightning" not in sys.modules
for name in ("ExactAccuracyCalculator", "ExactRetrievalEvaluator"):
    try:
        getattr(integrations, name)
    except ModuleNotFoundError as error:
        print(error)
"""


def test_one_sentence_says_what_to_install_once_it_is_needed():
    found = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [
        "fewshot_callbacks.integrations.ExactAccuracyCalculator needs pytorch-metric-learning, which is not installed. "
        "Run pip install pytorch-metric-learning.",
        "fewshot_callbacks.integrations.ExactRetrievalEvaluator needs sentence-transformers, which is not installed. "
        "Run pip install sentence-transformers.",
    ]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'fewshot_callbacks.integrations' has no attribute 'Exact'"):
        integrations.Exact  # noqa: B018 - what raises
