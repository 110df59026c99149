"""Each kind of argument in a file of LightningCLI gives what Python gives, and so does the config.yaml that is written."""

import copy

import jaxtyping
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

import fewshot_callbacks
from fewshot_callbacks import EmbeddingSource, TrialList, read_trials
from tests.callbacks import configured
from tests.callbacks.models import trainer
from tests.integration_packages import integration
from tests.messages import missing_facts, refused

HERE = "tests.callbacks.configured"
TRIALS = "1 0 4\n0 0 1\n1 2 6\n0 2 3\n1 1 5\n0 5 6\n"


@pytest.fixture(autouse=True)
def _without_type_checker():
    """As for users: a configuration gives lists where tuples are annotated."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def named(name, **arguments):
    return {"class_path": f"{HERE}.{name}", "init_args": arguments}


# (monitor, its arguments in YAML, the same in Python)
CASES = [
    *(("KnnMonitor", {"k": [1, 3], "source": "encoder", "bank": bank}, {"k": [1, 3], "source": "encoder", "bank": same})
      for bank, same in [
          ("self", "self"), ("gallery", "gallery"), ("train", "train"),
          (named("Own", count=24), configured.Own(24)),
          ({"class_path": f"{HERE}.Own"}, configured.Own()),
          (f"{HERE}.Own", configured.Own()),
          (named("OwnTensors", count=24), configured.OwnTensors(24)),
          (named("OwnLoader", count=24, batch_size=7), configured.OwnLoader(24, 7)),
          (named("BankOfTrainer", count=24), configured.BankOfTrainer(24)),
          (f"{HERE}.bank_of_24", configured.bank_of_24),
          (named("made", count=24), configured.made(24)),
      ]),
    ("KnnMonitor", {"k": 1, "bank": named("OwnTable", count=24), "source": {"source": "encoder", "labels": named("Labels")}},
     {"k": 1, "bank": configured.OwnTable(24), "source": EmbeddingSource("encoder", labels=configured.Labels())}),
    ("KnnMonitor", {"k": 1, "bank": "self", "source": named("Embedded")},
     {"k": 1, "bank": "self", "source": configured.Embedded()}),
    ("ProbeMonitor", {"source": "encoder", "bank": named("Own", count=24), "strengths": [0.1, 1.0], "groups": [0, 1]},
     {"source": "encoder", "bank": configured.Own(24), "strengths": [0.1, 1.0], "groups": [0, 1]}),
    ("ProbeMonitor", {"source": "encoder", "bank": named("OwnLoader", count=24), "strengths": 0.1},
     {"source": "encoder", "bank": configured.OwnLoader(24), "strengths": 0.1}),
    ("GeneralizationGapMonitor", {"source": "encoder", "bank": named("Own", count=24),
                                  "metrics": ["grouped_recall@1", "recall@1"]},
     {"source": "encoder", "bank": configured.Own(24), "metrics": ["grouped_recall@1", "recall@1"]}),
    *(("RetrievalMonitor", {"source": source}, {"source": same}) for source, same in [
        ({"source": "encoder", "labels": 1}, EmbeddingSource("encoder", labels=1)),
        ({"class_path": "fewshot_callbacks.EmbeddingSource", "init_args": {"source": "encoder", "labels": 1, "ids": 2}},
         EmbeddingSource("encoder", labels=1, ids=2)),
        ({"source": ["embeddings", "labels"], "ids": "item"}, EmbeddingSource(("embeddings", "labels"), ids="item")),
        ({"source": ["embeddings", "other"], "labels": ["labels", "labels"], "ids": ["item", "item"]},
         EmbeddingSource(("embeddings", "other"), labels=("labels", "labels"), ids=("item", "item"))),
        ({"embed": "encoder", "labels": 1}, EmbeddingSource(embed="encoder", labels=1)),
        (["embeddings", "labels"], ("embeddings", "labels")),
        (["embeddings", "other"], ("embeddings", "other")),
        (named("Embedded"), configured.Embedded()),
    ]),
    ("RetrievalMonitor", {"metrics": ["mAP", "grouped_recall@1"], "groups": ["item"], "threshold_bounds": [0.0, 1.0],
                          "label_groups": [[0, 1], [2, 3]], "dims": [4, 2], "codes": ["int8"], "similarity": "euclidean",
                          "loaders": [0], "name": "n", "max_queries": 20, "memory_mb": 10},
     {"metrics": ["mAP", "grouped_recall@1"], "groups": ["item"], "threshold_bounds": (0.0, 1.0),
      "label_groups": [[0, 1], [2, 3]], "dims": (4, 2), "codes": ("int8",), "similarity": "euclidean",
      "loaders": [0], "name": "n", "max_queries": 20, "memory_mb": 10}),
    ("RetrievalMonitor", {"metrics": "grouped_recall@1", "groups": "item", "dims": 4, "codes": "int8", "label_groups": 2,
                          "loaders": 0},
     {"metrics": "grouped_recall@1", "groups": "item", "dims": 4, "codes": "int8", "label_groups": 2, "loaders": 0}),
    ("RetrievalMonitor", {"groups": named("FromBatch"), "label_groups": None},
     {"groups": configured.FromBatch(), "label_groups": None}),
    *(("VerificationMonitor", {"trials": trials, "ids": ids, "metrics": ["eer", "min_dcf@0.1"], "source": "encoder"},
       {"trials": lambda trials=same: trials() if callable(trials) else trials, "ids": same_ids,
        "metrics": ["eer", "min_dcf@0.1"], "source": "encoder"})
      for trials, ids, same, same_ids in [
          ("pairs.txt", "item", lambda: read_trials("pairs.txt"), "item"),
          ("pairs.txt", 2, "pairs.txt", 2),
          ("lists/pairs.csv", named("FromBatch"), "lists/pairs.csv", configured.FromBatch()),
          ({"same": [True, False], "items": [["0", "4"], ["0", "1"]]}, "item",
           TrialList(same=(True, False), items=(("0", "4"), ("0", "1"))), "item"),
          ({"class_path": "fewshot_callbacks.TrialList",
            "init_args": {"same": [True, False], "items": [["0", "4"], ["0", "1"]]}}, "item",
           TrialList(same=(True, False), items=(("0", "4"), ("0", "1"))), "item"),
      ]),
    ("DiscriminantRatioMonitor", {"source": {"source": "encoder", "labels": 1}, "every_n_steps": None, "normalize": True},
     {"source": EmbeddingSource("encoder", labels=1), "every_n_steps": None, "normalize": True}),
    ("EmbeddingHealthMonitor", {"source": "encoder", "every_n_steps": 2, "k": 3, "loaders": [0]},
     {"source": "encoder", "every_n_steps": 2, "k": 3, "loaders": [0]}),
]  # fmt: skip


def identity(case):
    name, given, _ = case
    return f"{name}-{next(iter(given.values())) if len(given) == 1 else given.get('bank', given.get('trials', ''))}"


def values_of(run):
    values = {name: float(value) for name, value in run.callback_metrics.items()}
    return {name: value for name, value in values.items() if "share_of_time" not in name}


def from_file(file):
    """The Trainer after `fit --config`."""
    return LightningCLI(
        configured.Model,
        configured.Data,
        args=["fit", "--config", str(file)],
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
    ).trainer


def from_python(kind, arguments):
    torch.manual_seed(0)
    arguments = {name: value() if name == "trials" else value for name, value in arguments.items()}
    model = configured.Model()
    run = trainer(getattr(fewshot_callbacks, kind)(**arguments))
    run.fit(model, datamodule=configured.Data())
    return run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=identity)
def test_a_file_its_written_configuration_and_python_give_the_same(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lists").mkdir()
    for file in ("pairs.txt", "lists/pairs.csv"):
        (tmp_path / file).write_text(TRIALS)
    # Files with the names of a submodule and of an entry are not read in their place.
    for name in ("encoder", "item", "self"):
        (tmp_path / name).write_text("words\n")
    kind, given, arguments = case
    options = {"max_epochs": 1, "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    options |= {
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": str(tmp_path / "run"),
    }
    callbacks = [{"class_path": f"fewshot_callbacks.{kind}", "init_args": copy.deepcopy(given)}]
    (tmp_path / "given.yaml").write_text(yaml.safe_dump({"trainer": options | {"callbacks": callbacks}}))
    runs = [from_file(tmp_path / "given.yaml")]
    written = tmp_path / "run" / "config.yaml"
    assert "Unable to serialize" not in written.read_text()
    runs.append(from_file(written))
    expected = values_of(from_python(kind, arguments))
    assert expected
    for run in runs:
        assert values_of(run) == pytest.approx(expected, nan_ok=True, rel=0, abs=0)


@pytest.mark.parametrize("form", [dict, "omegaconf"])
def test_a_source_that_is_a_mapping_is_an_embedding_source(form):
    if form == "omegaconf":
        form = integration("omegaconf").OmegaConf.create
    monitor = fewshot_callbacks.RetrievalMonitor(source=form({"source": "encoder", "labels": 1, "ids": ["a", "b"]}))
    assert monitor.source == EmbeddingSource("encoder", labels=1, ids=("a", "b"))
    with refused(ValueError, "KnnMonitor", "EmbeddingSource", "'tags'", "labels"):
        fewshot_callbacks.KnnMonitor(bank="self", source=form({"source": "encoder", "tags": 1}))
    with refused(ValueError, "KnnMonitor", "source=3", "EmbeddingSource"):
        fewshot_callbacks.KnnMonitor(bank="self", source=3)


@pytest.mark.filterwarnings("ignore")
def test_another_word_for_a_bank_is_refused_with_the_words(tmp_path, capsys):
    callback = {"class_path": "fewshot_callbacks.KnnMonitor", "init_args": {"bank": "training"}}
    (tmp_path / "given.yaml").write_text(yaml.safe_dump({"trainer": {"logger": False, "callbacks": [callback]}}))
    with pytest.raises((ValueError, SystemExit)) as raised:
        from_file(tmp_path / "given.yaml")
    message = str(raised.value) + capsys.readouterr().err
    assert missing_facts(message, ("bank", "'train'", "'gallery'", "'self'")) == []
