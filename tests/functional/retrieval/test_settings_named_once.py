"""The settings of an evaluation are named once: signatures, docstrings, types and command-line options follow."""

import inspect
from dataclasses import fields
from typing import get_type_hints

import pytest

from fewshot_callbacks import (
    RetrievalEvaluation,
    RetrievalMonitor,
    evaluate_multilabel,
    evaluate_retrieval,
    grouped_recall,
)
from fewshot_callbacks.cli.options import evaluate
from fewshot_callbacks.functional.retrieval.settings import (
    GROUPED_NAMES,
    GroupedOptions,
    RankOptions,
    RetrievalOptions,
    RetrievalSettings,
    described_settings,
)

NAMES = {field.name for field in fields(RetrievalSettings)}


def test_types_meanings_and_defaults_are_of_the_same_settings():
    assert get_type_hints(RetrievalOptions).keys() == NAMES
    assert get_type_hints(RankOptions).keys() < NAMES
    for name, setting in described_settings().items():
        assert setting.meaning.endswith("."), name
        assert setting.default == getattr(RetrievalSettings(), name)


def test_without_sources_only_the_meanings_are_missing(monkeypatch):
    def missing(_):
        raise OSError("source code not available")

    monkeypatch.setattr(inspect, "getsource", missing)
    settings = described_settings.__wrapped__()
    assert settings.keys() == NAMES
    assert not any(setting.meaning for setting in settings.values())


@pytest.mark.parametrize(
    ("target", "options", "others"),
    [
        (evaluate_retrieval, RetrievalOptions, {}),
        (RetrievalMonitor, RetrievalOptions, {}),
        (RetrievalEvaluation, RetrievalOptions, {}),
        (evaluate_multilabel, RankOptions, {"ndcg_k": (10,)}),
        (grouped_recall, GroupedOptions, {"k": 1}),
    ],
)
def test_signature_and_docstring_show_each_setting(target, options, others):
    parameters, described = inspect.signature(target).parameters, described_settings()
    for name, hint in get_type_hints(options).items():
        setting = described[GROUPED_NAMES.get(name, name) if options is GroupedOptions else name]
        assert parameters[name].default == others.get(name, setting.default)
        assert parameters[name].annotation == hint
        assert f"        {name}: {setting.meaning.split()[0]} " in target.__doc__
    assert "settings" not in parameters
    assert "**settings" not in target.__doc__


def test_the_command_line_has_each_setting_but_the_confidence_of_its_tables():
    options = evaluate()
    assert {action.dest for action in options._actions} & NAMES == NAMES - {"confidence"}
    text = " ".join(options.format_help().split())
    assert all(f"--{name}" in text for name in NAMES - {"confidence"})
    assert "Number of labels in a group for Grouped Recall" in text


@pytest.mark.parametrize("call", [evaluate_retrieval, RetrievalMonitor, evaluate_multilabel])
@pytest.mark.parametrize("kind", [TypeError, ValueError])
def test_a_misspelt_setting_is_named_with_the_one_that_is_near(call, kind):
    arguments = ([[1.0]], [0]) if call is not RetrievalMonitor else ()
    with pytest.raises(kind, match=rf"^{call.__name__}: there is no setting 'recal_k'. Did you mean 'recall_k'\?"):
        call(*arguments, recal_k=(1,))


def test_a_misspelt_argument_beside_the_settings_is_found_too():
    with pytest.raises(TypeError, match=r"no setting 'gallery_ladder'. Did you mean 'gallery_loader'\?"):
        RetrievalMonitor(gallery_ladder=1)
    with pytest.raises(TypeError, match=r"no setting 'query_place'. Did you mean 'query_places'\?"):
        evaluate_retrieval([[1.0]], [0], query_place=[0])
    with pytest.raises(TypeError, match=r"evaluate_multilabel: there is no setting 'auc_pr'"):
        evaluate_multilabel([[1.0]], [[1]], auc_pr=True)
    with pytest.raises(
        ValueError, match=r"no setting 'zzz'. The settings are similarity, recall_k, .*device_memory_mb\."
    ):
        RetrievalEvaluation(zzz=1)
