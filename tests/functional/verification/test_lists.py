"""`read_trials` reads the lists of LFW and VoxCeleb and tables of scores; `trial_scores` scores their items."""

from dataclasses import replace

import pytest
import torch

from fewshot_callbacks import InputError, TrialList, nearest, read_trials, trial_scores
from tests.messages import refused

LFW = "2\t1\nAnn\t1\t4\nBob\t2\tAnn\t1\nBob\t1\t2\nAnn\t4\tEve\t1\n"
VOXCELEB = "1 id1/a/1.wav id1/b/2.wav\n0 id1/a/1.wav id2/c/1.wav\n"


def read(tmp_path, text):
    path = tmp_path / "list.txt"
    path.write_text(text, encoding="utf-8")
    return read_trials(path)


def test_each_form(tmp_path):
    assert read(tmp_path, LFW) == TrialList(
        same=(True, False, True, False),
        first=("Ann", "Bob", "Bob", "Ann"),
        second=("Ann", "Ann", "Bob", "Eve"),
        folds=("0", "0", "1", "1"),
        items=(("Ann_0001", "Bob_0002", "Bob_0001", "Ann_0004"), ("Ann_0004", "Ann_0001", "Bob_0002", "Eve_0001")),
    )
    assert read(tmp_path, LFW.replace("2\t1\n", "2\n", 1)).folds is None  # the list for development has no folds
    assert read(tmp_path, VOXCELEB + "\n") == TrialList(
        same=(True, False),
        first=("id1", "id1"),
        second=("id1", "id2"),
        items=(("id1/a/1.wav", "id1/a/1.wav"), ("id1/b/2.wav", "id2/c/1.wav")),
    )
    in_one_folder = read(tmp_path, "1 wav/1.wav wav/2.wav\n0 wav/1.wav wav/3.wav\n")
    assert (in_one_folder.first, in_one_folder.second) == (None, None)
    table = "\ufeffscore, same,fold,first,second,x\n0.5,1,a,p,p,9\n-1e-3,False,b,p,q,9\n"
    assert read(tmp_path, table) == TrialList((True, False), ("p", "p"), ("p", "q"), ("a", "b"), (0.5, -0.001))


@pytest.mark.parametrize("text", [LFW, LFW.replace("\t", " ")])
def test_pairs_of_lfw_without_their_first_line_have_no_folds(tmp_path, text):
    whole, headless = read(tmp_path, text), read(tmp_path, text.partition("\n")[2])
    assert headless == replace(whole, folds=None)
    two_people_first = "\n".join(["Bob 2 Ann 1", "Ann 1 4"])
    assert read(tmp_path, two_people_first).same == (False, True)


@pytest.mark.parametrize("separator", [",", ";", "\t", " , "])
@pytest.mark.parametrize(("yes", "no"), [("1", "0"), ("1.0", "0.0"), ("True", "false"), ('"1"', '"0"')])
def test_tables_of_every_spreadsheet(tmp_path, separator, yes, no):
    rows = [["score", "same", "first"], ["0.5", yes, '"Ann, the first; no other"'], ["-2", no, "Bob"]]
    table = read(tmp_path, "\n".join(separator.join(row) for row in rows))
    assert table == TrialList((True, False), ("Ann, the first; no other", "Bob"), None, None, (0.5, -2.0))


def test_items_are_found_by_their_ids_or_by_the_names_of_their_files(tmp_path):
    first, second = read(tmp_path, LFW).rows(
        ["lfw/Ann/Ann_0004.jpg", "Ann_0001", "Bob_0002", "Bob_0001", "Eve_0001.png"]
    )
    assert (first.tolist(), second.tolist()) == ([1, 2, 3, 0], [0, 1, 2, 4])
    found = read(tmp_path, VOXCELEB).rows(["id1/a/1.wav", "id2/c/1.wav", "id1/b/2.wav"])
    assert [side.tolist() for side in found] == [[0, 0], [2, 1]]


@pytest.mark.parametrize("similarity", ["cosine", "euclidean", "hamming"])
def test_scores_are_those_of_the_search(similarity):
    embeddings = torch.randn(12, 5).sign() if similarity == "hamming" else torch.randn(12, 5)
    found = nearest(embeddings, k=11, similarity=similarity)
    rows = torch.arange(12).repeat_interleave(11)
    scores = trial_scores(embeddings.numpy(), rows, found.indices.flatten().tolist(), similarity=similarity)
    assert torch.equal(scores, found.scores.flatten())


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("", ("empty", "pairs.txt")),
        ("1 a b\n2 a c\n", ("line 2", "'2 a c'", "trial")),
        ("2\t1\nAnn\t1\tfour\n", ("line 2", r"'Ann\t1\tfour'", "trial")),
        ("2\t2\nAnn\t1\t4\n", ("1 pairs", "2 folds", "2 pairs")),
        ("score,label\n0.1,1\n", ("score, label", "score and same")),
        ("score,same\n", ("first line", "trial")),
        ("score,same\n0.1,1\nnan,0\n", ("line 3", "'nan,0'", "score", "'nan'")),
        ("score,same\n0.1,1\n0.2,maybe\n", ("line 3", "'0.2,maybe'", "same", "'maybe'", 1)),
        ("score,same\n0.1,2\n", ("line 2", "same", "'2'", 1)),
        ("score,same\n\n0.1\n", ("line 3", "1 cell", "2 columns", "score, same")),
        ("score,same\n0,1,1\n", ("line 2", "3 cells", "2 columns", "score, same")),  # a decimal comma
        ("Ann 1 4\nAnn 1\n", ("line 2", "'Ann 1'", "trial")),
    ],
)
def test_a_line_that_is_no_trial_is_refused_by_its_number(tmp_path, text, facts):
    with refused(ValueError, "read_trials", "list.txt", *facts):
        read(tmp_path, text)


@pytest.mark.usefixtures("as_users_run_it")
def test_a_file_that_is_no_list_and_items_without_one_embedding_are_refused(tmp_path):
    with refused(ValueError, tmp_path / "nowhere.txt"):
        read_trials(tmp_path / "nowhere.txt")
    (tmp_path / "trials.txt").write_bytes(bytes(range(256)))
    with refused(ValueError, "read_trials", "trials.txt", "UTF-8"):
        read_trials(tmp_path / "trials.txt")
    pairs = read(tmp_path, LFW)
    with refused(ValueError, "2 items", "embedding", "'Ann_0004'"):
        pairs.rows(["Ann_0001", "Bob_0001", "Bob_0002"])
    with refused(ValueError, "1 item", "embedding", "'Ann_0004'"):
        pairs.rows(["a/Ann_0004.jpg", "b/Ann_0004.jpg", "Ann_0001", "Bob_0001", "Bob_0002", "Eve_0001"])
    with refused(ValueError, "list", "scores", "items"):
        read(tmp_path, "score,same\n0.1,1\n").rows(["a"])


DECOMPOSED, COMPOSED = "re\u0301.wav", "r\u00e9.wav"


@pytest.mark.parametrize("in_list", [DECOMPOSED, COMPOSED])
@pytest.mark.parametrize("in_ids", [DECOMPOSED, COMPOSED, f"folder/{DECOMPOSED}"])
def test_names_with_combining_marks_are_found_in_either_form(tmp_path, in_list, in_ids):
    stem = in_list.removesuffix(".wav")
    made = TrialList(same=(True, False), items=((in_list, "b"), ("c", "d")))
    if "/" in in_ids:
        made = TrialList(same=(True, False), items=((stem, "b"), ("c", "d")))
    text = f"1 {made.items[0][0]} c\n0 b d\n"
    for trials in (made, read(tmp_path, text)):
        assert [side.tolist() for side in trials.rows([in_ids, "b", "c", "d"])] == [[0, 1], [2, 3]]
        assert trials.names(in_ids)


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"items": (("a", "b"), ("c", "d"))}, ("items[0]", 2, "items[1]")),
        ({"items": (("a",), ())}, ("items[1]", 0)),
        ({"first": tuple("abcd")}, ("first", 4)),
        ({"second": tuple("abcde")}, ("second", 5)),
        ({"folds": ("a", "b", "c")}, ("folds", 3)),
        ({"scores": ()}, ("scores", 0)),
    ],
)
def test_fields_of_other_lengths_are_refused_where_the_list_is_made(fields, facts):
    with refused(ValueError, "same", 1, *facts):
        TrialList(same=(True,), **fields)


PAIRS = [("a", "b"), ("a", "c"), ("d", "e")]


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(("items", "entries"), [(PAIRS, 3), (tuple(PAIRS), 3), (PAIRS[:1], 1), (PAIRS[0], 2)])
def test_a_list_of_pairs_is_refused_with_the_call_that_turns_it_into_columns(items, entries):
    """Seen red: Python's own error, `too many values to unpack`."""
    with refused(InputError, "TrialList", "first_items", "second_items", "items=tuple(zip(*pairs))", entries):
        TrialList(same=(True, False, False)[: len(items)], items=items)


@pytest.mark.usefixtures("as_users_run_it")
def test_columns_of_pairs_are_read():
    expected = TrialList(same=(True, False, False), items=(("a", "a", "d"), ("b", "c", "e")))
    assert TrialList(same=(True, False, False), items=tuple(zip(*PAIRS, strict=True))) == expected
    assert TrialList(same=(True, False, False), items=zip(*PAIRS, strict=True)) == expected


AGES = "score,same,first_age,second_age,sensor,note\n0.9,1,old,young,a,x\n0.2,0,old,old,b,y\n"


def test_columns_of_a_table_are_slices(tmp_path):
    (tmp_path / "trials.csv").write_text(AGES)
    found = read_trials(tmp_path / "trials.csv", ("age", "sensor"))
    assert found.slices == {"age": (("old", "old"), ("young", "old")), "sensor": (("a", "b"), ("a", "b"))}
    assert found.chosen([1]).slices == {"age": (("old",), ("old",)), "sensor": (("b",), ("b",))}
    assert read_trials(tmp_path / "trials.csv").slices is None
    (tmp_path / "trials.txt").write_text(VOXCELEB)
    for name, fact in (("trials.csv", "first_light"), ("trials.txt", "items")):
        with refused(ValueError, "read_trials", name, "light", "slices", fact):
            read_trials(tmp_path / name, ["light"])
    with refused(ValueError, "TrialList", "slices['age'][1]", "2 trials"):
        TrialList(same=(True, False), slices={"age": (("a", "b"), ("a",))})
