"""`fewshot trials`: lists with embeddings, tables of scores, figures, and what cannot be read."""

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from fewshot_callbacks import evaluate_trials, trial_scores
from fewshot_callbacks.cli.main import main
from tests.messages import missing_facts


def refused(capsys, *words):
    assert main(["trials", *map(str, words)]) == 1
    return capsys.readouterr().err


def test_a_table_of_scores_is_printed_drawn_and_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    rng, folds = np.random.default_rng(0), np.arange(400) % 5
    first, second = rng.integers(0, 30, (2, 400))
    second[:150] = first[:150]
    same = first == second
    scores = rng.normal(size=400) + 1.5 * same
    path, page = tmp_path / "scores.csv", tmp_path / "page.html"
    rows = zip(scores.tolist(), same.astype(int), first, second, folds, strict=True)
    path.write_text("score,same,first,second,fold\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    expected = evaluate_trials(scores, same, first=first, second=second, folds=folds)

    assert main(["trials", str(path), "--json", "--figures", str(tmp_path / "figures")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["metrics"] == expected.to_dict()["metrics"]
    assert printed["intervals"]["eer"] == pytest.approx(list(expected.intervals["eer"]))
    assert sorted(file.name for file in (tmp_path / "figures").iterdir()) == ["det.png", "scores.png"]
    assert main(["trials", str(path), "--report", str(page)]) == 0
    screen, html = capsys.readouterr().out, page.read_text()
    assert html.count("data:image/png;base64,") == 2
    assert f'<td class="number">{expected["eer"]:.4f}</td>' in html
    # the worst mistakes: the highest score of two people, and the lowest of one
    for n in (np.where(same, -np.inf, scores).argmax(), np.where(same, scores, np.inf).argmin()):
        cells = f"{scores[n]:.4f}</td><td><bdi>{first[n]}</bdi></td><td><bdi>{second[n]}</bdi></td>"
        assert f'{cells}<td class="number">{n}</td>' in html

    low, high = expected.intervals["eer"]
    for part in (
        *(f"{expected['eer']:.4f}", f"{low:.4f} to {high:.4f}", "400 trials of 30 identities"),
        *(f"{expected['accuracy']:.4f} ± {expected.accuracy_error:.4f}", f"note {expected.notes[0][:60]}"),
    ):
        assert part in screen
    assert main(["trials", str(path), "--json", "--metrics", "eer,tar@far0.1", "accuracy"]) == 0
    assert list(json.loads(capsys.readouterr().out)["metrics"]) == ["eer", "tar@far0.1", "accuracy"]
    assert missing_facts(refused(capsys, path, "--embeddings", "e.npz"), (path, "scores", "--embeddings")) == []


def test_the_area_under_the_roc_curve_is_on_the_screen_in_the_page_and_in_json(tmp_path, capsys):
    path, page = tmp_path / "scores.csv", tmp_path / "page.html"
    path.write_text("score,same\n4,1\n3,0\n2,1\n1,0\n")  # three of four couples are in the right order
    assert main(["trials", str(path), "--metrics", "pair_auroc", "--report", str(page)]) == 0
    assert missing_facts(capsys.readouterr().out, ("pair_auroc", "0.7500")) == []
    assert '<td class="number">0.7500</td>' in page.read_text()
    assert main(["trials", str(path), "--metrics", "pair_auroc", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == {"pair_auroc": 0.75}


def test_lists_of_items_are_scored_by_their_embeddings(tmp_path, capsys):
    items = [f"id{speaker}/{part}.wav" for speaker in range(6) for part in range(4)]
    embeddings = np.random.default_rng(0).normal(size=(24, 8)) + np.arange(24)[:, None] // 4
    path, stored = tmp_path / "trials.txt", tmp_path / "e.npz"
    np.savez(stored, embeddings=embeddings, ids=items)
    pairs = [(a, b) for a in range(24) for b in range(a)]
    path.write_text("\n".join(f"{int(a // 4 == b // 4)} {items[a]} {items[b]}" for a, b in pairs))
    assert main(["trials", str(path), "--embeddings", str(stored), "--json", "--similarity", "euclidean"]) == 0
    scores = trial_scores(embeddings, *zip(*pairs, strict=True), similarity="euclidean")
    expected = evaluate_trials(scores, [a // 4 == b // 4 for a, b in pairs])
    assert json.loads(capsys.readouterr().out)["metrics"] == expected.to_dict()["metrics"]
    assert missing_facts(refused(capsys, path), ("trials.txt", "items", "scores", "--embeddings FILE")) == []
    np.savez(stored, embeddings=embeddings[:20], ids=items[:20])
    said = refused(capsys, path, "--embeddings", stored)
    assert missing_facts(said, ("4 items", "embedding", "'id5/0.wav'")) == []
    np.savez(stored, embeddings=embeddings, ids=items[:20])
    assert missing_facts(refused(capsys, path, "--embeddings", stored), ("24 embeddings", "20 ids")) == []


@pytest.fixture
def scored(tmp_path):
    rows = [f"{score / 40},{score % 3 == 0:d}" for score in range(40)]
    (tmp_path / "scores.csv").write_text("score,same\n" + "\n".join(rows))
    return tmp_path / "scores.csv"


@pytest.mark.parametrize("name", ["det.png", "scores.png"])
def test_pictures_of_somebody_else_are_not_replaced(name, scored, tmp_path, capsys):
    """Refused before anything is computed or written; its own pictures are replaced."""
    figures = tmp_path / "figures"
    assert main(["trials", str(scored), "--figures", str(figures)]) == 0
    assert main(["trials", str(scored), "--figures", str(figures)]) == 0
    other = {"det.png": "scores.png", "scores.png": "det.png"}[name]
    (figures / other).unlink()
    Image.new("L", (4, 4)).save(figures / name)
    before = (figures / name).read_bytes()
    capsys.readouterr()
    said = refused(capsys, scored, "--figures", figures)
    assert missing_facts(said, (figures / name, "fewshot trials", "--figures")) == []
    assert (figures / name).read_bytes() == before
    assert [file.name for file in figures.iterdir()] == [name]


def test_figures_cannot_lie_in_a_file(scored, tmp_path, capsys):
    (tmp_path / "figures").write_text("")
    said = refused(capsys, scored, "--figures", tmp_path / "figures")
    assert missing_facts(said, (tmp_path / "figures", "folder", "--figures")) == []


def test_figures_that_cannot_be_written_leave_the_earlier_ones_whole(scored, tmp_path, capsys):
    figures = tmp_path / "figures"
    assert main(["trials", str(scored), "--figures", str(figures)]) == 0
    before = {file.name: file.read_bytes() for file in figures.iterdir()}
    capsys.readouterr()
    script = (
        "import resource, signal, sys\n"
        "from fewshot_callbacks.cli.main import main\n"
        "import fewshot_callbacks.report\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"  # every file ends there, as on a full disk
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", script, "trials", str(scored), "--figures", str(figures)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "det.png" in ended.stderr
    assert "FEWSHOT_DEBUG" not in ended.stderr
    assert {file.name: file.read_bytes() for file in figures.iterdir()} == before


def test_what_is_written_is_said_and_what_lacks_is_named_as_the_shell_has_it(scored, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    figures, page = tmp_path / "figures", tmp_path / "page.html"
    assert main(["trials", str(scored), "--figures", str(figures), "--report", str(page)]) == 0
    screen = capsys.readouterr().out
    for path in (figures / "det.png", figures / "scores.png", page):
        assert missing_facts(screen, (path,)) == []
    table = tmp_path / "plain.csv"
    table.write_text("score,same\n0.9,1\n0.2,0\n0.8,1\n0.1,0\n")
    said = refused(capsys, table, "--metrics", "accuracy")
    assert "--metrics accuracy" in said
    assert "folds=" not in said


def test_slices_of_a_table_are_printed_worst_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    rng = np.random.default_rng(0)
    same = rng.random(400) < 0.4
    ages = np.array(["old", "young"])[rng.integers(0, 2, (2, 400))]
    scores = rng.normal(size=400) + 2 * same
    rows = "".join(f"{row[0]},{row[1]:d},{row[2]},{row[3]}\n" for row in zip(scores.tolist(), same, *ages, strict=True))
    path = tmp_path / "scores.csv"
    path.write_text("score,same,first_age,second_age\n" + rows)
    report = evaluate_trials(scores, same, slices={"age": tuple(ages)})
    assert main(["trials", str(path), "--slices", "age", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["slices"] == json.loads(json.dumps(report.to_dict()["slices"]))
    assert main(["trials", str(path), "--slices", "age"]) == 0
    screen = capsys.readouterr().out
    found = report.of_slices("age", "eer")
    for title, rates in (("FNMR by age", found.false_non_match_rate), ("FMR by age", found.false_match_rate)):
        lines = screen[screen.index(title) :].splitlines()
        names = [line.split()[0] for line in lines if line.split() and line.split()[0] in rates][: len(rates)]
        assert names == sorted(rates, key=lambda name: -rates[name].value)
    assert missing_facts(screen, (f"{found.threshold:.4f}", "the threshold of eer", "95 %")) == []
    assert main(["trials", str(path), "--slices", "age", "--metrics", "cllr"]) == 0
    assert missing_facts(refused(capsys, path, "--slices", "light"), ("light", "first_age", "--slices")) == []


def test_slices_of_items_are_those_of_the_embeddings(tmp_path, capsys):
    items = [f"id{speaker}/{part}.wav" for speaker in range(6) for part in range(4)]
    embeddings = np.random.default_rng(0).normal(size=(24, 8)) + np.arange(24)[:, None] // 4
    sensors = np.array(["phone", "studio"])[np.arange(24) % 2]
    path, stored = tmp_path / "trials.txt", tmp_path / "e.npz"
    np.savez(stored, embeddings=embeddings, ids=items, sensor=sensors)
    pairs = [(a, b) for a in range(24) for b in range(a)]
    path.write_text("\n".join(f"{int(a // 4 == b // 4)} {items[a]} {items[b]}" for a, b in pairs))
    words = [str(path), "--embeddings", str(stored), "--slices", "sensor"]
    assert main(["trials", *words, "--json"]) == 0
    one, other = zip(*pairs, strict=True)
    found = json.loads(capsys.readouterr().out)["slices"]["sensor"]["eer"]
    scores = trial_scores(embeddings, one, other)
    same = [a // 4 == b // 4 for a, b in pairs]
    sides = sensors[list(one)], sensors[list(other)]
    expected = evaluate_trials(scores, same, slices={"sensor": sides}).of_slices("sensor", "eer")
    for kind in ("false_match_rate", "false_non_match_rate"):
        assert {name: rate["mistakes"] for name, rate in found[kind].items()} == {
            name: rate.mistakes for name, rate in getattr(expected, kind).items()
        }
    np.savez(stored, embeddings=embeddings, ids=items, sensor=sensors[:20])
    assert missing_facts(refused(capsys, *words), ("24 ids", "20 values", "'sensor'")) == []
    assert missing_facts(refused(capsys, *words[:-1], "light"), ("'light'", "'sensor'", "--slices")) == []
    assert missing_facts(refused(capsys, words[0], "--slices", "sensor"), ("items", "'sensor'")) == []
