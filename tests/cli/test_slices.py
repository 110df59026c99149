"""`fewshot evaluate --slices` shows the slices of a report, and `--require` fails the command."""

import json

import numpy as np
import pytest

from fewshot_callbacks import compare_slices, evaluate_retrieval
from fewshot_callbacks.cli import evaluate
from fewshot_callbacks.cli.main import main
from fewshot_callbacks.functional import RetrievalReport
from tests.messages import missing_facts

METRICS = ("--metrics", "recall@1", "mAP", "pair_f1")
LABELS = np.arange(240) % 40
CAMERAS = np.array(["roof", "door", "yard"])[np.arange(240) // 2 % 3]
IS_GALLERY = np.arange(240) % 240 >= 120


def rows(noise):
    generator = np.random.default_rng(0)
    return (np.eye(40)[LABELS] + noise * generator.normal(size=(240, 40))).astype(np.float32)


def written(folder, form):
    """A file of embeddings, and the report of it."""
    arrays = {"embeddings": rows(0.3), "labels": LABELS, "camera": CAMERAS}
    arguments = ([rows(0.3), LABELS], {"slices": {"camera": CAMERAS}})
    divided = (
        [rows(0.3)[~IS_GALLERY], LABELS[~IS_GALLERY], rows(0.3)[IS_GALLERY], LABELS[IS_GALLERY]],
        {"slices": {"camera": CAMERAS[~IS_GALLERY]}},
    )
    if form.startswith("is_gallery"):
        arrays["is_gallery"] = IS_GALLERY
        arguments = divided
    if form == "two sets":
        queries, query_labels, gallery, gallery_labels = divided[0]
        arrays = {
            "queries": queries,
            "query_labels": query_labels,
            "gallery": gallery,
            "gallery_labels": gallery_labels,
        }
        arrays["camera"] = CAMERAS[~IS_GALLERY]
        arguments = divided
    if form.endswith("parquet"):
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        columns = {name: list(values) for name, values in arrays.items()}
        parquet.write_table(pyarrow.table(columns), folder / "items.parquet")
    else:
        np.savez(folder / "items.npz", **arrays)
    return next(folder.glob("items.*")), evaluate_retrieval(*arguments[0], **arguments[1], metrics=METRICS[1:])


def printed(capsys, *words, status=0):
    capsys.readouterr()
    assert main(["evaluate", *map(str, words)]) == status
    return capsys.readouterr()


FORMS = ["one set", "two sets", "is_gallery", "parquet", "is_gallery in parquet"]


@pytest.mark.parametrize("form", FORMS)
def test_slices_are_those_of_the_column(form, tmp_path, capsys):
    path, report = written(tmp_path, form)
    shown = json.loads(printed(capsys, path, "--slices", "camera", *METRICS, "--json").out)
    assert shown["slices"] == report.to_dict()["slices"]
    assert set(shown["slices"]["camera"]) == {"recall@1", "mAP"}
    of_camera = shown["slices"]["camera"]["mAP"]
    assert {name: found["value"] for name, found in of_camera.items()} == {
        name: found.value for name, found in report.of_slices("camera", "mAP").items()
    }
    words = printed(capsys, path, "--slices", "camera", *METRICS).out
    table = words[words.index("recall@1 by camera") :].splitlines()
    names = [line.split()[0] for line in table if line.split() and line.split()[0] in CAMERAS]
    assert names == sorted(names, key=lambda name: report.of_slices("camera")[name].value)
    assert "The worst slice" in " ".join(words.split())


def test_two_files_have_the_gains_of_each_slice(tmp_path, capsys):
    path, report = written(tmp_path, "one set")
    np.savez(tmp_path / "old.npz", embeddings=rows(0.5), labels=LABELS)
    other = evaluate_retrieval(rows(0.5), LABELS, metrics=METRICS[1:])
    words = (path, "--against", tmp_path / "old.npz", "--slices", "camera", *METRICS)
    shown = json.loads(printed(capsys, *words, "--json").out)
    gains = compare_slices(report, other, "camera", "recall@1")
    assert shown["slice_gains"] == {"camera": json.loads(json.dumps(gains.to_dict()))}
    table = printed(capsys, *words).out
    assert (
        missing_facts(table, ("recall@1 by camera", *(f"{gain.difference.value:+.4f}" for gain in gains.values())))
        == []
    )
    required = (*words, "--require", "gain(mAP).low >= 0", "--require", "gain(mAP) < 0")
    lines = printed(capsys, *required, status=3).err.splitlines()
    assert [line.split(" is required")[0] for line in lines] == ["fewshot evaluate: gain(mAP) < 0"]


def test_a_saved_report_serves_as_the_other_file(tmp_path, capsys):
    path, report = written(tmp_path, "one set")
    old = tmp_path / "old.npz"
    np.savez(old, embeddings=rows(0.5), labels=LABELS)
    saved, again = tmp_path / "old.report.npz", tmp_path / "new.report.npz"
    printed(capsys, old, *METRICS, "--save", saved)
    words = (path, "--slices", "camera", *METRICS, "--require", "worst(camera) gain(mAP).low >= 0", "--json")
    found, expected = (json.loads(printed(capsys, *words, "--against", file).out) for file in (saved, old))
    for part in ("differences", "slice_gains"):
        assert found[part] == expected[part]
    kept = printed(capsys, *words, "--require", "gain(mAP) < 0", "--against", saved, "--save", again, status=3)
    assert kept.err.startswith("fewshot evaluate: gain(mAP) < 0 is required")
    assert RetrievalReport.load(again).mAP == report.mAP
    before = saved.read_bytes()
    said = printed(capsys, *words, "--against", saved, "--save", saved, status=1).err
    assert missing_facts(said, ("--save", saved)) == []
    assert saved.read_bytes() == before


def test_a_saved_report_of_other_queries_is_refused(tmp_path, capsys):
    path, _ = written(tmp_path, "one set")
    np.savez(tmp_path / "others.npz", embeddings=rows(0.5)[:200], labels=LABELS[:200])
    printed(capsys, tmp_path / "others.npz", *METRICS, "--save", tmp_path / "others.report.npz")
    said = printed(capsys, path, *METRICS, "--against", tmp_path / "others.report.npz", status=1).err
    assert missing_facts(said, ("queries",)) == []


def test_a_requirement_that_fails_has_a_line_and_the_status_3(tmp_path, capsys):
    path, report = written(tmp_path, "one set")
    words = [path, *METRICS, "--slices", "camera", "--require", "mAP >= 0", "--require", "mAP >= 0.999"]
    failed = printed(capsys, *words, "--require", "worst(camera) recall@1 > 1", "--json", status=3)
    slices = report.of_slices("camera")
    assert failed.err.splitlines() == [
        f"fewshot evaluate: mAP >= 0.999 is required, but it is {report.mAP:.4f}.",
        f"fewshot evaluate: worst(camera) recall@1 > 1 is required, but it is {slices[slices.worst].value:.4f} "
        f"(camera {slices.worst}).",
    ]
    assert json.loads(failed.out)["metrics"]["mAP"] == report.mAP
    assert printed(capsys, *words[:-2]).err == ""


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("--require", "mAP => 0.7"), ("'mAP => 0.7'", "cannot be read")),
        (("--require", "mrr > 0"), ("'mrr'", "--metrics")),
        (("--require", "worst(camera) mAP > 0"), ("'camera'", "--slices")),
        (("--require", "gain(mAP) > 0"), ("--against",)),
        (("--slices", "light"), ("'light'", "'camera'", "--slices")),
    ],
)
def test_what_cannot_be_checked_is_refused_before_anything_is_computed(words, facts, tmp_path, capsys, monkeypatch):
    path, _ = written(tmp_path, "one set")
    monkeypatch.setattr(evaluate, "evaluate_retrieval", lambda *_, **__: pytest.fail("the file was evaluated"))
    said = printed(capsys, path, *METRICS, *words, status=1).err
    assert said.count("\n") == 1
    assert missing_facts(said, facts) == []


def test_processes_have_the_slices_of_their_rows(tmp_path):
    from fewshot_callbacks.cli.processes import part_of_process
    from fewshot_callbacks.cli.stored_sets import load_sets
    from tests.thread_processes import in_threads

    path, report = written(tmp_path, "is_gallery")
    sets = load_sets(path, slices=("camera",))

    def work(process):
        queries, arguments = part_of_process(*evaluate.inputs_of(sets), process)
        return evaluate_retrieval(queries, **arguments, metrics=METRICS[1:])

    for found in in_threads(2, work):
        assert found.of_slices("camera") == report.of_slices("camera")
