"""`fewshot search-quality` prints what the function returns, for lists in every format."""

import json

import numpy as np
import pytest

from fewshot_callbacks import nearest, search_quality
from fewshot_callbacks.cli.main import main
from tests.messages import missing_facts


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Files of queries, gallery and found lists, and the function's result for them."""
    folder = tmp_path_factory.mktemp("search")
    generator = np.random.default_rng(0)
    labels = np.arange(600) % 30
    rows = (generator.standard_normal((30, 12))[labels] + generator.standard_normal((600, 12))).astype(np.float32)
    coarse = np.round(rows[100:])
    found = nearest(rows[:100], gallery=coarse, k=10).indices.numpy()
    found[:7, 3] = -1
    np.savez(folder / "queries.npz", embeddings=rows[:100], labels=labels[:100])
    np.savez(folder / "gallery.npz", embeddings=rows[100:], labels=labels[100:])
    np.save(folder / "rows.npy", rows[:100])
    np.save(folder / "gallery.npy", rows[100:])
    np.save(folder / "coarse.npy", coarse)
    np.save(folder / "found.npy", found)
    np.savez(folder / "found.npz", scores=np.zeros((100, 10)), indices=found)
    np.concatenate([np.full((100, 1), 10), found], axis=1).astype("<i4").tofile(folder / "found.ivecs")
    named = {"query_labels": labels[:100], "gallery_labels": labels[100:]}
    quality = search_quality(found, rows[:100], rows[100:], **named, k=(5, 10), stored=coarse)
    return folder, quality


def run(folder, capsys, *words):
    """The exit status and the two outputs of a command, whose files are those of the folder."""
    words = [str(folder / word) if (folder / word).is_file() else word for word in words]
    status = main(["search-quality", *words])
    return status, *capsys.readouterr()


@pytest.mark.parametrize("name", ["found.npy", "found.npz", "found.ivecs"])
def test_prints_what_the_function_returns(name, stored, capsys):
    folder, quality = stored
    words = [name, "queries.npz", "--gallery", "gallery.npz", "-k", "5", "10", "--stored", "coarse.npy"]
    status, printed, _ = run(folder, capsys, *words)
    assert status == 0
    assert printed.splitlines()[:4] == str(quality).splitlines()[:4]
    status, printed, _ = run(folder, capsys, *words, "--json")
    assert json.loads(printed) == json.loads(json.dumps(quality.to_dict()))


def test_parquet_and_files_without_labels(stored, capsys, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder, quality = stored
    lists = np.load(folder / "found.npy")
    path = tmp_path / "found.parquet"
    parquet.write_table(pyarrow.table({"query": np.arange(100), "indices": pyarrow.array(lists.tolist())}), path)
    status, printed, _ = run(folder, capsys, str(path), "rows.npy", "--gallery", "gallery.npy", "--json")
    assert status == 0
    values = json.loads(printed)["values"]
    assert values["search_recall@10"] == quality.recall[10]
    assert "recall@1" not in values


def test_a_requirement_decides_the_exit_status(stored, capsys):
    folder, quality = stored
    words = ["found.npy", "queries.npz", "--gallery", "gallery.npz"]
    assert run(folder, capsys, *words, "--require", "search_recall@10 >= 0.2", "--require", "map@10_min > 0")[0] == 0
    status, _, errors = run(folder, capsys, *words, "--require", "search_recall@10.high < 0.1")
    assert status == 3
    assert not missing_facts(errors, (f"{quality.intervals[10].high:.4f}", "search_recall@10.high < 0.1"))


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["nothing.npy", "queries.npz"], ("nothing.npy", ".ivecs")),
        (["queries.npz", "queries.npz", "--gallery", "gallery.npz"], ("found", "float32")),
        (["gallery.npy.txt", "queries.npz"], ("gallery.npy.txt",)),
        (["coarse.ivecs", "queries.npz"], ("coarse.ivecs", "4 bytes")),
        (["found.npy", "queries.npz", "--gallery", "gallery.npz", "-k", "11"], ("--k 11", "10 columns")),
        (["found.npy", "queries.npz", "--gallery", "gallery.npz", "--require", "gain(mAP) > 0"], ("gain(mAP) > 0",)),
        (["found.npy", "queries.npz", "--gallery", "gallery.npz", "--require", "mAP > 0"], ("'mAP'", "map@10_min")),
    ],
)
def test_mistakes_are_named(words, facts, stored, capsys):
    folder, _ = stored
    (folder / "gallery.npy.txt").write_text("1 2 3")
    np.arange(5, dtype="<i4").tofile(folder / "coarse.ivecs")
    status, _, errors = run(folder, capsys, *words)
    assert status == 1
    assert not missing_facts(errors, facts), errors
