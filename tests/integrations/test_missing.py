"""A library is imported when one of its evaluators is asked for; if it is not installed, a line says how to."""

import subprocess
import sys

from fewshot_callbacks import integrations
from tests.messages import missing_facts, refused

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


def test_a_missing_library_is_named_with_its_installation_once_it_is_needed():
    found = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    calculator, evaluator = found.stdout.splitlines()
    name = "fewshot_callbacks.integrations.ExactAccuracyCalculator"
    assert missing_facts(calculator, (name, "pip install pytorch-metric-learning")) == []
    name = "fewshot_callbacks.integrations.ExactRetrievalEvaluator"
    assert missing_facts(evaluator, (name, "pip install sentence-transformers")) == []


def test_an_unknown_name_is_an_attribute_error():
    with refused(AttributeError, "fewshot_callbacks.integrations", "'Exact'"):
        integrations.Exact  # noqa: B018 - what raises
