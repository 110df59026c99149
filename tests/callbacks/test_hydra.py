"""Settings from Hydra: every list may be a `ListConfig`, and a file of callbacks makes monitors that run."""

from collections import UserList
from dataclasses import fields

import jaxtyping
import pytest
import torch

from fewshot_callbacks import EmbeddingSource, KnnMonitor, ProbeMonitor, RetrievalMonitor, evaluate_retrieval
from fewshot_callbacks.functional import RetrievalSettings
from fewshot_callbacks.settings import RetrievalDefaults
from tests.callbacks import configured
from tests.callbacks.models import Net, loader, logged_by, trainer
from tests.integration_packages import integration

LISTS = {"metrics": ["mAP", "grouped_recall@1"], "threshold_bounds": [0.0, 0.5], "label_groups": [[0, 1], [2, 3]]}
"""A list for each setting that takes one."""


@pytest.fixture(autouse=True)
def _without_type_checker():
    """As for users: a configuration gives lists where tuples are annotated."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def list_config(values):
    return integration("omegaconf").OmegaConf.create(values)


def user_list(values):
    return UserList(user_list(value) if isinstance(value, list) else value for value in values)


FORMS = (user_list, list_config)


def test_every_setting_that_takes_a_list_is_tried():
    names = {field.name for field in fields(RetrievalDefaults) if "tuple" in field.type or field.name in LISTS}
    assert names == set(LISTS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LISTS)
def test_a_setting_that_takes_a_list_takes_any(name, form):
    settings = RetrievalSettings(**{name: form(LISTS[name])})
    assert settings == RetrievalSettings(**{name: LISTS[name]})
    assert type(getattr(settings, name)) in (list, tuple)
    assert RetrievalMonitor(**{name: form(LISTS[name])})._settings == settings
    rows, labels = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 4
    expected = evaluate_retrieval(rows, labels, **{name: LISTS[name]})
    assert evaluate_retrieval(rows, labels, **{name: form(LISTS[name])}) == expected


@pytest.mark.parametrize("form", FORMS)
def test_entries_of_the_batch_and_sources_are_lists_of_any_kind(form):
    entries = form(["person", "camera"])
    assert RetrievalMonitor(groups=entries)._groups == RetrievalMonitor(groups=["person", "camera"])._groups
    probes = [ProbeMonitor(groups=groups, strengths=[1.0]) for groups in (entries, ["person", "camera"])]
    assert probes[0]._groups == probes[1]._groups
    assert EmbeddingSource(form(["z", "y"]), ids=form(["a", "b"])) == EmbeddingSource(("z", "y"), ids=("a", "b"))
    assert KnnMonitor(k=form([1, 5]), bank="self").k == [1, 5]


CALLBACKS = """
retrieval:
  _target_: fewshot_callbacks.RetrievalMonitor
  metrics: [mAP, "recall@1", "recall@precision0.95"]
  threshold_bounds: [0.0, 1.0]
  label_groups: null
knn:
  _target_: fewshot_callbacks.KnnMonitor
  k: [1, 3]
  bank: self
"""
"""In the form of lightning-hydra-template."""


def test_a_file_of_callbacks_makes_monitors_that_run(tmp_path):
    instantiate = integration("hydra.utils").instantiate
    load = integration("omegaconf").OmegaConf.load
    (tmp_path / "callbacks.yaml").write_text(CALLBACKS)
    config = load(tmp_path / "callbacks.yaml")
    monitors = [instantiate(entry) for entry in config.values()]
    settings = {
        "metrics": ["mAP", "recall@1", "recall@precision0.95"],
        "threshold_bounds": (0.0, 1.0),
        "label_groups": None,
    }
    written = [RetrievalMonitor(**settings), KnnMonitor(k=[1, 3], bank="self")]
    logs = []
    for callbacks in (monitors, written):
        torch.manual_seed(0)
        run = trainer(*callbacks)
        run.fit(Net(), loader(), loader())
        logs.append(logged_by(run))
    assert logs[0] == logs[1]
    assert {"val/mAP", "val/recall@precision0.95", "val/knn@3"} <= set(logs[0])


def test_a_bank_of_ones_own_class_and_a_mapping_as_source_run(tmp_path):
    instantiate = integration("hydra.utils").instantiate
    bank = {"_target_": "tests.callbacks.configured.Own", "count": 24}
    entry = {
        "_target_": "fewshot_callbacks.KnnMonitor",
        "k": 1,
        "bank": bank,
        "source": {"source": "encoder", "labels": 1},
    }
    monitors = [
        instantiate(list_config(entry)),
        KnnMonitor(1, configured.Own(24), source=EmbeddingSource("encoder", labels=1)),
    ]
    logs = []
    for monitor in monitors:
        torch.manual_seed(0)
        run = trainer(monitor)
        run.fit(configured.Model(), datamodule=configured.Data())
        logs.append({name: float(value) for name, value in run.callback_metrics.items()})
    assert logs[0] == logs[1]
    assert "val/knn@1" in logs[0]
