"""`fewshot trials`: lists with embeddings, tables of scores, figures, and what cannot be read."""

import json

import numpy as np
import pytest

from fewshot_callbacks import evaluate_trials, trial_scores
from fewshot_callbacks.cli.main import main


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 30, (2, 400))
    second[:150] = first[:150]
    same = first == second
    scores = rng.normal(size=400) + 1.5 * same
    path = tmp_path / "scores.csv"
    rows = zip(scores.tolist(), same.astype(int), first, second, np.arange(400) % 5, strict=True)
    path.write_text("score,same,first,second,fold\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    return path, evaluate_trials(scores, same, first=first, second=second, folds=np.arange(400) % 5)


def test_a_table_of_scores(table, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    path, expected = table
    assert main(["trials", str(path), "--json", "--figures", str(tmp_path / "figures")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["metrics"] == expected.to_dict()["metrics"]
    assert printed["intervals"]["eer"] == pytest.approx(list(expected.intervals["eer"]))
    assert sorted(file.name for file in (tmp_path / "figures").iterdir()) == ["det.png", "scores.png"]
    assert main(["trials", str(path), "--report", str(tmp_path / "page.html")]) == 0
    capsys.readouterr()
    page, lines = (tmp_path / "page.html").read_text(), path.read_text().splitlines()[1:]
    assert page.count("data:image/png;base64,") == 2
    assert f'<td class="number">{expected["eer"]:.4f}</td>' in page
    for same, lowest in (("0", False), ("1", True)):
        trials = [(n, *line.split(",")) for n, line in enumerate(lines) if line.split(",")[2 - 1] == same]
        n, score, _, first, second, _ = sorted(trials, key=lambda row: float(row[1]), reverse=not lowest)[0]
        cells = f"{float(score):.4f}</td><td><bdi>{first}</bdi></td><td><bdi>{second}</bdi></td>"
        assert f'{cells}<td class="number">{n}</td>' in page
    assert main(["trials", str(path), "--metrics", "eer,tar@far0.1", "accuracy"]) == 0
    screen = capsys.readouterr().out
    low, high = expected.intervals["eer"]
    assert f"{expected['eer']:.4f}" in screen
    assert f"{low:.4f} to {high:.4f}" in screen
    assert f"{expected['accuracy']:.4f} ± {expected.accuracy_error:.4f}" in screen
    assert "400 trials of 30 identities" in screen
    assert main(["trials", str(path), "--embeddings", "e.npz"]) == 1
    assert "has scores. Leave out --embeddings" in capsys.readouterr().err


def test_lists_of_items_with_embeddings(tmp_path, capsys):
    items = [f"id{speaker}/{part}.wav" for speaker in range(6) for part in range(4)]
    embeddings = np.random.default_rng(0).normal(size=(24, 8)) + np.arange(24)[:, None] // 4
    np.savez(tmp_path / "e.npz", embeddings=embeddings, ids=items)
    pairs = [(a, b) for a in range(24) for b in range(a)]
    lines = [f"{int(a // 4 == b // 4)} {items[a]} {items[b]}" for a, b in pairs]
    path = tmp_path / "trials.txt"
    path.write_text("\n".join(lines))
    assert (
        main(["trials", str(path), "--embeddings", str(tmp_path / "e.npz"), "--json", "--similarity", "euclidean"]) == 0
    )
    scores = trial_scores(embeddings, *zip(*pairs, strict=True), similarity="euclidean")
    expected = evaluate_trials(scores, [a // 4 == b // 4 for a, b in pairs])
    assert json.loads(capsys.readouterr().out)["metrics"] == expected.to_dict()["metrics"]
    assert main(["trials", str(path)]) == 1
    assert "trials.txt lists items, not scores. Pass --embeddings FILE" in capsys.readouterr().err
    np.savez(tmp_path / "e.npz", embeddings=embeddings[:20], ids=items[:20])
    assert main(["trials", str(path), "--embeddings", str(tmp_path / "e.npz")]) == 1
    assert "4 items of the list have no embedding, or several, the first is 'id5/0.wav'" in capsys.readouterr().err
    np.savez(tmp_path / "e.npz", embeddings=embeddings, ids=items[:20])
    assert main(["trials", str(path), "--embeddings", str(tmp_path / "e.npz")]) == 1
    assert "has 24 embeddings and 20 ids" in capsys.readouterr().err
