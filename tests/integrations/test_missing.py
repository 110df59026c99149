"""A library is imported when one of its evaluators is asked for; if it is not installed, there is a one-sentence error."""

import subprocess
import sys

import pytest

from fewshot_callbacks import integrations
from tests.messages import refused


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("ExactAccuracyCalculator", "pytorch-metric-learning"),
        ("ExactRetrievalEvaluator", "sentence-transformers"),
    ],
)
def test_a_missing_library_is_named_with_the_command_that_installs_it(name, library, monkeypatch):
    missing = library.replace("-", "_")

    class Uninstalled:
        def find_spec(self, module, *_):
            if module == missing:
                raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    for module in list(sys.modules):
        if module.partition(".")[0] == missing or module == f"fewshot_callbacks.integrations.{missing}":
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Uninstalled(), *sys.meta_path])
    with refused(ModuleNotFoundError, f"fewshot_callbacks.integrations.{name}", f"pip install {library}"):
        getattr(integrations, name)


@pytest.mark.slow
def test_the_metrics_for_transformers_do_not_import_lightning():
    code = (
        "import sys\n"
        "from fewshot_callbacks.integrations import BatchRetrievalMetrics\n"
        "BatchRetrievalMetrics()\n"
        "sys.exit('lightning' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_is_an_attribute_error():
    with refused(AttributeError, "fewshot_callbacks.integrations", "Exact"):
        integrations.Exact  # noqa: B018 - what raises
