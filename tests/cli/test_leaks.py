"""`fewshot evaluate --train`: the sentence on copies of queries in training, in tables and as JSON."""

import json

import numpy as np
import pytest

from fewshot_callbacks import evaluate_retrieval, leakage
from fewshot_callbacks.cli.main import main
from tests.messages import missing_facts


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A test set, and a training set with copies of its first 12 queries and the ids of its last 5."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    labels = np.arange(120) % 12
    centres = rng.normal(size=(12, 8))[labels]
    test, train = (centres + rng.normal(size=(120, 8)) for _ in range(2))
    train[:12] = test[:12]
    np.savez("test.npz", embeddings=test, labels=labels, ids=np.arange(120))
    np.savez("train.npz", embeddings=train, ids=np.arange(115, 235))
    np.savez("narrow.npz", embeddings=train[:, :5])
    np.savez("both.npz", queries=test, gallery=train, query_labels=labels, gallery_labels=labels)
    return test, train, labels


def test_the_sentence_is_that_of_the_function(files, capsys):
    test, train, labels = files
    report = evaluate_retrieval(test, labels, metrics=("mAP", "recall@1"))
    known = leakage(report, test, train, query_ids=np.arange(120), train_ids=np.arange(115, 235), min_score=0.97)
    words = [
        "evaluate",
        "test.npz",
        "--train",
        "train.npz",
        "--metrics",
        "mAP",
        "recall@1",
        "--duplicates_from",
        "0.97",
    ]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == known.in_words()
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["leakage"] == known.to_dict()
    assert known.to_dict()["copies_by_id"] == 5


def test_without_a_training_set_nothing_is_said(files, capsys):
    assert main(["evaluate", "test.npz", "--json"]) == 0
    assert "leakage" not in json.loads(capsys.readouterr().out)


def test_files_that_are_read_piece_by_piece_give_the_same(files, capsys):
    np.save("test_rows.npy", files[0])
    np.save("train_rows.npy", files[1])
    np.save("labels.npy", files[2])
    found = []
    for words in (
        ["test.npz", "--train", "train.npz"],
        ["test_rows.npy", "--train", "train_rows.npy", "--labels", "labels.npy"],
    ):
        assert main(["evaluate", *words, "--metrics", "mAP", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["leakage"])
    with_ids, without = found
    assert with_ids["copies_by_score"] == without["copies"] == 12
    assert without["copies_by_id"] is None


def test_binary_codes_have_copies_by_their_share_of_equal_bits(files, capsys):
    codes, labels = np.sign(files[0]), files[2]
    changed = codes[:12].copy()
    changed[:6, 0] *= -1  # 7 of 8 bits are equal
    np.savez("codes.npz", embeddings=codes, labels=labels)
    np.savez("train_codes.npz", embeddings=changed)
    counts = []
    for share in ("1", "0.87"):
        words = ["codes.npz", "--train", "train_codes.npz", "--similarity", "hamming", "--duplicates_from", share]
        assert main(["evaluate", *words, "--metrics", "mAP", "--json"]) == 0
        counts.append(json.loads(capsys.readouterr().out)["leakage"]["copies"])
    bits = np.array([[(query == item).sum() for item in changed] for query in codes]).max(axis=1)
    assert counts == [int((bits == 8).sum()), int((bits >= 7).sum())]


def test_the_state_of_a_resumed_evaluation_belongs_to_the_training_set(files, capsys):
    words = ["evaluate", "test.npz", "--train", "train.npz", "--metrics", "mAP", "--resume", "state", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["leakage"]["copies"] == 17


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--duplicates_from", "0.9"], ("--duplicates_from", "--train")),
        (["--train", "train.npz", "--against", "test.npz"], ("--train", "--against")),
        (["--train", "narrow.npz"], ("8 components", "narrow.npz", 5)),
        (["--train", "both.npz"], ("both.npz", "gallery", "--train", "one set")),
        (["--train", "missing.npz"], ("missing.npz",)),
        (["--train", "train.npz", "--duplicates_from", "2"], ("--duplicates_from 2", 0.98)),
        (["--train", "train.npz", "--save", "train.npz"], ("--save", "train.npz")),
    ],
)
def test_mistakes_are_refused_before_the_evaluation(words, facts, files, capsys):
    assert main(["evaluate", "test.npz", *words]) == 1
    out, said = capsys.readouterr()
    assert (out, said.count("\n")) == ("", 1)
    assert missing_facts(said, facts) == []
