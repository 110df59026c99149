"""The settings of an evaluation are named once: signatures, docstrings, types and command-line options follow."""

import inspect
import re
from dataclasses import fields
from typing import get_type_hints

import pytest

from fewshot_callbacks import RetrievalEvaluation, RetrievalMonitor, evaluate_retrieval, grouped_recall
from fewshot_callbacks.cli.options import evaluate
from fewshot_callbacks.functional.retrieval.settings import (
    GONE,
    GroupedOptions,
    RetrievalOptions,
    RetrievalSettings,
    described_settings,
)

NAMES = {field.name for field in fields(RetrievalSettings)}


def test_types_meanings_and_defaults_are_of_the_same_settings():
    assert get_type_hints(RetrievalOptions).keys() == NAMES
    for name, setting in described_settings().items():
        assert setting.meaning.endswith("."), name
        assert setting.default == getattr(RetrievalSettings(), name)


@pytest.mark.parametrize(
    ("target", "options", "others"),
    [
        (evaluate_retrieval, RetrievalOptions, {}),
        (RetrievalMonitor, RetrievalOptions, {}),
        (RetrievalEvaluation, RetrievalOptions, {}),
        (grouped_recall, GroupedOptions, {}),
    ],
)
def test_signature_and_docstring_show_each_setting(target, options, others):
    parameters, described = inspect.signature(target).parameters, described_settings()
    for name, hint in get_type_hints(options).items():
        assert parameters[name].default == others.get(name, described[name].default)
        assert parameters[name].annotation == hint
        assert f"        {name}: {described[name].meaning.split()[0]} " in target.__doc__
    assert "settings" not in parameters
    assert "**settings" not in target.__doc__


def test_evaluations_have_few_arguments():
    assert len(inspect.signature(evaluate_retrieval).parameters) <= 22
    assert len(inspect.signature(RetrievalMonitor).parameters) <= 24


def test_the_command_line_has_each_setting_but_the_confidence_of_its_tables():
    options = evaluate()
    assert {action.dest for action in options._actions} & NAMES == NAMES - {"confidence"}
    text = " ".join(options.format_help().split())
    assert all(f"--{name}" in text for name in NAMES - {"confidence"})
    assert "Groups of labels for Grouped Recall: the number" in text


@pytest.mark.parametrize("call", [evaluate_retrieval, RetrievalMonitor])
@pytest.mark.parametrize("kind", [TypeError, ValueError])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("metric", r"there is no setting 'metric'. Did you mean 'metrics'\?"),
        ("zzz", r"there is no setting 'zzz'. The settings are similarity, metrics, .*memory_mb.*\."),
        *((name, re.escape(f"{name} is no setting. Write {instead}.")) for name, instead in GONE.items()),
    ],
)
def test_an_unknown_setting_is_named_with_the_one_that_is_meant(call, kind, name, words):
    arguments = ([[1.0]], [0]) if call is not RetrievalMonitor else ()
    with pytest.raises(kind, match=f"^{call.__name__}: {words}"):
        call(*arguments, **{name: (1,)})


def test_a_misspelt_argument_beside_the_settings_is_found_too():
    with pytest.raises(TypeError, match=r"no setting 'galery'. Did you mean 'gallery'\?"):
        RetrievalMonitor(galery=1)
    with pytest.raises(TypeError, match=r"no setting 'query_id'. Did you mean 'query_ids'\?"):
        evaluate_retrieval([[1.0]], [0], query_id=[0])
