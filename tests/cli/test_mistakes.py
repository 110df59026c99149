"""A mistake of the person at the keyboard ends in one line that names the fix, without a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fewshot_callbacks.cli.main import DEBUG, main, one_line
from fewshot_callbacks.cli.parsing import as_yaml, parse
from fewshot_callbacks.cli.signals import BROKEN_PIPE, INTERRUPTED, TERMINATED
from fewshot_callbacks.protonet import ProtoNet
from tests.cli.command_options import CONFIGS, MONITORS, ONE_EPOCH, QUIET, write_images
from tests.messages import missing_facts, refused

FOLDER, GLYPHS = (str(CONFIGS / f"protonet_dr_{data}.yaml") for data in ("folder", "glyphs"))
SIZES = ("train.shots=1", "train.queries=2", "train.episodes=1", "evaluation.shots=1", "evaluation.queries=2")
SIZES += ("evaluation.episodes=5", "num_workers=0", "dataset.transform.image_size=16")
SMALL = [*(f"--data.{size}" for size in SIZES), *ONE_EPOCH, *QUIET]
FIT = ["fit", "--config", FOLDER, *SMALL, "--trainer.logger=false"]


GROUPS = ("2^63", "[[0, 1], [2, 3]]", "'auto'")
"""What groups of labels may be."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of images, and one run on it."""
    folder = tmp_path_factory.mktemp("trained")
    write_images(folder / "images")
    (folder / "monitors.yaml").write_text(MONITORS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["fit", "--config", FOLDER, "--config=monitors.yaml", "--data.dataset.root=images", *SMALL]) == 0
    return folder


@pytest.fixture
def there(trained, monkeypatch):
    """The same as working directory, in which no further run may appear."""
    monkeypatch.chdir(trained)
    yield trained
    assert sorted(file.name for file in trained.iterdir()) == ["images", "monitors.yaml", "runs"]
    assert [file.name for file in (trained / "runs").iterdir()] == ["version_0"]


def last_line(capsys):
    """Return the final message; there must be no traceback before it."""
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said.rstrip("\n").splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("evaluate a.npz --fmr 0.1", ("--fmr",)),
        ("evaluate a.npz --simlarity dot", ("--simlarity", "--similarity")),
        ("evaluate a.npz --threshold high", ("--threshold", "high", "number")),
        ("evaluate a.npz --label_groups 1.5", ("--label_groups", 1.5, *GROUPS)),
        ("evaluate a.npz --label_groups [[1", ("--label_groups", "[[1", *GROUPS)),
        ("evaluate a.npz --threshold_bounds 0,1,2", ("--threshold_bounds", "0,1,2", "[0, 1]")),
        ("evaluate a.npz --similarity dott", ("--similarity", "dott", "'cosine'", "'dot'", "'euclidean'", "'hamming'")),
        ("evaluate a.npz --unknown foo", ("--unknown", "foo", "'error'", "'ignore'")),
        ("plan --queries 1e30 --dim 3", ("--queries", "1e30", "2^63", 5)),
        (f"plan --queries 1{'0' * 30} --dim 3", ("--queries", f"1{'0' * 30}", "2^63", 5)),
        ("compare a b --test maybe", ("--test", "maybe", "true", "false")),
    ],
)
def test_a_mistyped_word_is_one_line_with_what_was_probably_meant(words, facts, capsys):
    with refused(SystemExit, 2):
        main(words.split())
    command, said = words.split()[0], capsys.readouterr().err
    assert said.startswith(f"fewshot {command}: ")
    assert said.count("\n") == 1
    assert missing_facts(said, (*facts, f"fewshot {command} --help")) == []


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (f"--config {GLYPHS} --model.haed=dr", ("--model.haed", "--model.head")),
        (f"--config {GLYPHS} --trainer.max_ep 3", ("--trainer.max_ep", "--trainer.max_epochs")),
        (f"--config {GLYPHS} --seed_every=3", ("--seed_every", "--seed_everything")),
        (f"--config {GLYPHS} --ckpt none", ("--ckpt", "--ckpt_path")),
        (f"--config {GLYPHS} --trainer.callbacks+=RetrievalMonitors",
         ("--trainer.callbacks", "RetrievalMonitors", "file", "class", "RetrievalMonitor")),
        ("--data.help ImageFolder",
         ("--data.help: ImageFolder", "data set", "--data FewShotDataModule --data.dataset.help ImageFolder")),
        ("--data ImageFolder",
         ("--data: ImageFolder", "data set", "--data FewShotDataModule --data.dataset ImageFolder")),
        (f"--config {GLYPHS} --trainer.callbacks+=Glyphs", ("--trainer.callbacks: Glyphs", "data set", "--data")),
        ("--model Glyphs --data FewShotDataModule", ("--model: Glyphs", "data set", "--data FewShotDataModule")),
        ("--data RetrievalMonitor",
         ("--data: RetrievalMonitor", "callback", "--trainer.callbacks+ RetrievalMonitor")),
        ("--model FewShotDataModule --data FewShotDataModule",
         ("--model: FewShotDataModule", "data module", "--data FewShotDataModule")),
        ("--data evaluate_retrieval", ("--data: evaluate_retrieval", "class")),
        ("--data.help Glyph", ("--data.help: Glyph", "file", "class", "Glyphs")),
        ("", ("data", "--config protonet_dr_glyphs")),
    ],
)  # fmt: skip
def test_a_mistyped_word_of_a_training_is_one_line(words, facts, capsys):
    with refused(SystemExit, 2):
        main(["fit", *words.split()])
    said = capsys.readouterr().err
    assert said.startswith(("fewshot fit: ", "fewshot: "))
    assert said.count("\n") == 1
    assert missing_facts(said, facts) == []


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("evaluate", "required file"),
        ("evaluate a.npz b.npz", "unrecognized b.npz"),
        ("compare a --json", "required other_run"),
        (f"fit --config {GLYPHS} --model.head dx", "head softmax dr dx"),
        ("fit -c protonet_dr_glyphs --model.head dx", "head softmax dr dx"),
        (f"fit --config {FOLDER} --data.train.ways=many", "data train ways int many"),
        (f"fit --config {FOLDER} --data.dataset.transform.sise=8", "data dataset transform.sise"),
        ("fit --config nowhere.yaml", "config exist nowhere.yaml"),
        ("fit --config modl.yaml", "modl.head"),
        ("fit --config class.yaml", "data fewshot_callbacks.data Glyph"),
        (f"fit --config {GLYPHS} --trainer.callbacks+=RetrievalMonitor --trainer.callbacks.similarity=dott",
         "trainer.callbacks similarity cosine dot dott"),
        (f"fit --config {GLYPHS} --trainer.callbacks+=RetrievalMonitor --trainer.callbacks.xyz=1", "trainer.callbacks xyz"),
        (f"fit --config {GLYPHS} --data broken.Data", "data broken.py"),
        (f"fit --config {GLYPHS} --data needing.Data", "data some_package"),
    ],
)  # fmt: skip
def test_what_the_parser_refuses_is_told_by_its_innermost_reason_in_one_line(
    words, facts, tmp_path, monkeypatch, capsys
):
    """In its words, which name the option, the value and what was expected."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modl.yaml").write_text("modl: {head: dr}")
    (tmp_path / "class.yaml").write_text("data: {class_path: fewshot_callbacks.data.Glyph}")
    (tmp_path / "broken.py").write_text("class Data(")
    (tmp_path / "needing.py").write_text("import some_package")
    monkeypatch.syspath_prepend(tmp_path)
    with refused(SystemExit, 2):
        main(words.split())
    command = words.split()[0]
    said = capsys.readouterr().err
    assert said.startswith(f"fewshot {command}: ")
    assert said.count("\n") == 1
    assert missing_facts(said, (f"fewshot {command} --help",)) == []
    assert [fact for fact in facts.split() if fact not in said] == []


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Some files with embeddings under other names."""
    monkeypatch.chdir(tmp_path)
    rows, labels = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32), np.arange(60) % 6
    np.savez("named.npz", emb=rows, y=labels)
    np.savez("two.npz", a=rows, b=rows, labels=labels)
    np.savez("usual.npz", embeddings=rows, labels=labels)


@pytest.mark.parametrize("words", ["", " --label_groups auto", " --label_groups AUTO"])
def test_few_classes_have_no_grouped_recall_and_no_note(words, files, capsys):
    assert main(f"evaluate usual.npz{words}".split()) == 0
    said = capsys.readouterr()
    assert "rouped" not in said.out + said.err


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("evaluate named.npz",
         ("named.npz", "'emb'", "'y'", "'embeddings'", "'labels'", "--embeddings", "--labels", "queries", "gallery")),
        ("report named.npz", ("named.npz", "'emb'", "'y'", "'embeddings'", "'labels'")),
        ("evaluate two.npz --labels labels", ("two.npz", "'embeddings'", "'a'", "'b'", "--embeddings")),
        ("evaluate named.npz --labels y --ids i", ("named.npz", "'i'", "'emb'", "'y'", "--ids")),
        ("evaluate usual.npz --max_queries 0", ("--max_queries 0", "positive")),
        ("evaluate usual.npz --metrics mAP --label_groups 3", ("--label_groups 3", "Grouped Recall", "metrics")),
        ("evaluate usual.npz --threshold nan", ("--threshold nan", "finite")),
        ("plan --queries 0 --dim 3", ("--queries 0", "positive")),
        ("report usual.npz -o r.html --duplicates_from 2", ("cosine", "2.0")),
        ("trials none.txt", ("none.txt",)),
    ],
)  # fmt: skip
def test_a_message_speaks_of_options_as_the_shell_writes_them(words, facts, files, capsys):
    assert main(words.split()) == 1
    said = last_line(capsys)
    assert said.startswith(f"fewshot {words.split()[0]}: ")
    assert missing_facts(said, facts) == []


def test_a_note_speaks_of_options_as_the_shell_writes_them(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["evaluate", "usual.npz", "--metrics", "mAP", "grouped_recall@1", "--label_groups", "4"]) == 0
    screen = capsys.readouterr().out
    assert "--label_groups" in screen
    assert "label_groups=" not in screen


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=5), st.sampled_from([",", ", ", " "]))
def test_numbers_and_lists_as_people_write_them(numbers, between):
    for word in (str(numbers[0]), f"{numbers[0]:,}", f"{numbers[0]:_}", f"{numbers[0]}.0"):
        found = parse("plan", ["--dim=1", f"--queries={word}"]).queries
        assert (found, type(found)) == (numbers[0], int)
    if len(numbers) > 1:
        word = between.join(map(str, numbers))
        for form in (f"({word})", f"[{word}]" if between != " " else word):
            assert yaml.safe_load(as_yaml(form, tuple[float, ...])) == numbers


@pytest.mark.parametrize(
    ("word", "facts"),
    [
        ("--data.dataset.root=nowhere", ("folder", "nowhere", "'train'", "'val'", "'test'")),
        ("--data.train.queries=9", ("train", "--data.train.ways 5", "--data.train.queries 9")),
        ("--data.train.ways=0", (0, "ways >= 1")),
        ("--trainer.max_epochs=-5", ("max_epochs", -5)),
    ],
)
def test_data_that_cannot_be_used_is_one_line(word, facts, there, capsys):
    assert main([*FIT, "--data.dataset.root=images", word]) == 1
    said = last_line(capsys)
    assert said.startswith("fewshot fit: ")
    assert missing_facts(said, facts) == []


@pytest.mark.parametrize(("workers", "kept"), [(0, 0), (1, 300)])
def test_a_broken_image_is_named(workers, kept, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images")
    image = tmp_path / "images" / "val" / "val2" / "1.png"
    image.write_bytes(image.read_bytes()[:kept])
    assert main([*FIT, "--data.dataset.root=images", f"--data.num_workers={workers}"]) == 1
    assert last_line(capsys).startswith("fewshot fit: images/val/val2/1.png ")


BEST = "runs/version_0/checkpoints/best.ckpt"
RUN = ["--config", "runs/version_0/config.yaml"]


def test_without_a_checkpoint_nothing_is_evaluated(there, capsys):
    assert main(["test", *RUN]) == 1
    said = last_line(capsys)
    assert said.startswith("fewshot test: ")
    assert missing_facts(said, ("weights", f"--ckpt_path {BEST}", "--ckpt_path none")) == []


@pytest.mark.parametrize("word", ["none", BEST])
def test_a_test_evaluates_what_was_asked_for_and_makes_no_run(word, there, tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(ProtoNet, "on_test_end", lambda self: seen.append(self.state_dict()), raising=False)
    logger = ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path}"]  # it writes only there
    assert main(["test", *RUN, "--ckpt_path", word, *(logger if word != "none" else [])]) == 0
    assert "test/mAP" in capsys.readouterr().out
    assert len(list(tmp_path.glob("**/metrics.csv"))) == (word != "none")
    stored = torch.load(BEST, weights_only=True)["state_dict"]
    [weights] = seen
    same = all(torch.equal(weights[name], stored[name]) for name in stored)
    assert same == (word != "none")
    steps = [int(value) for name, value in weights.items() if name.endswith("num_batches_tracked")]
    assert any(steps) == (word != "none")  # nor the weights of another checkpoint: this network has seen no batch
    assert steps


def test_hyperparameters_that_the_checkpoint_overrules_are_named(there, capsys):
    assert main(["test", *RUN, "--ckpt_path", BEST, "--model.head=softmax", "--model.learning_rate=0.5"]) == 0
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "hyperparameters" in line]
    assert missing_facts(said, ("checkpoint", "head = dr", "softmax", "learning_rate = 0.001", 0.5)) == []
    assert main(["test", *RUN, "--ckpt_path", BEST]) == 0
    assert "hyperparameters" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "facts"),
    [
        ("runs/version_0/checkpoints/bst.ckpt", ("bst.ckpt", "best.ckpt", "last.ckpt")),
        ("runs/version_0", ("runs/version_0", BEST)),
        ("{}/0.ckpt", ("0.ckpt", "'fewshot fit'", "damaged")),
        ("{}/-100.ckpt", ("-100.ckpt", "'fewshot fit'", "damaged")),
        ("{}/other.ckpt", ("weights", "size mismatch", "backbone.blocks.0.0.weight")),
    ],
)
def test_a_checkpoint_that_is_none_is_one_line(path, facts, there, tmp_path, capsys):
    for end in (0, -100):  # torch.load raises an error of its own for each
        (tmp_path / f"{end}.ckpt").write_bytes((there / BEST).read_bytes()[:end])
    content = torch.load(BEST, weights_only=True)
    content["state_dict"]["backbone.blocks.0.0.weight"] = torch.zeros(64, 1, 3, 3)
    torch.save(content, tmp_path / "other.ckpt")
    assert main(["test", *RUN, "--ckpt_path", path.format(tmp_path)]) == 1
    said = last_line(capsys)
    assert missing_facts(said, ("checkpoint", *facts)) == []
    assert (missing_facts(said, ("config.yaml", "--config")) == []) == ("other" in path)


def test_a_configuration_that_is_none_is_named(there, tmp_path, capsys):
    (tmp_path / "best.ckpt").write_bytes((there / BEST).read_bytes())
    file = tmp_path / "config.yaml"
    for content, facts in (
        ("- a\n- b\n", ("configuration", "model", "data", "trainer")),
        ("trainer: {callbacks: [\n", ("damaged", "YAML")),
    ):
        file.write_text(content)
        for command in (["compare", str(tmp_path), "runs/version_0"], ["fit", "--config", str(file)]):
            assert main(command) == 1
            said = last_line(capsys)
            assert said.startswith(f"fewshot {command[0]}: {file} ")
            assert missing_facts(said, facts) == []


@pytest.mark.parametrize(
    ("name", "status", "word", "steps"),
    [("SIGINT", INTERRUPTED, "Interrupted", 1), ("SIGTERM", TERMINATED, "Terminated", 0)],
)
def test_ctrl_c_in_a_training_says_what_is_kept(name, status, word, steps, trained, tmp_path, monkeypatch, capsys):
    """And SIGTERM, as Slurm, Kubernetes and `timeout` send it: with status 0 the run would pass for complete."""
    monkeypatch.chdir(tmp_path)
    step = ProtoNet.training_step

    def stopped(self, batch, batch_idx):
        if self.trainer.global_step == steps:
            signal.raise_signal(getattr(signal, name))
        return step(self, batch, batch_idx)

    monkeypatch.setattr(ProtoNet, "training_step", stopped)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    # A shell ignores SIGINT for what it starts in the background, and so would this process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config = ["--config", FOLDER, "--config", str(trained / "monitors.yaml")]
    # Lightning stops after the step, or after the validation behind it
    sizes = ["--trainer.max_epochs=3", f"--data.train.episodes={1 if steps else 3}"]
    try:
        assert main(["fit", *config, f"--data.dataset.root={trained / 'images'}", *SMALL, *sizes]) == status
        assert signal.getsignal(signal.SIGTERM) == before[1]
    finally:
        signal.signal(signal.SIGINT, before[0])  # which Lightning ignores from then on
    last = "runs/version_0/checkpoints/last.ckpt"
    said = last_line(capsys)
    assert (
        missing_facts(said, (word, BEST, f"--ckpt_path {last}") if steps else (word, "checkpoint", "validation")) == []
    )
    assert (".ckpt" in said) == (steps > 0)


def test_a_reader_that_goes_away_ends_it_quietly(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert main(["plan", "--queries", "9", "--dim", "3", "--json"]) == BROKEN_PIPE
    assert capsys.readouterr().err == ""


STREAMS = """
import os, sys
os.closerange(3, 30)  # a file that is opened next takes the place of a closed stream
from fewshot_callbacks.cli.main import main

for words in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        stream, *rest = words.split()
        sys.argv[1:] = rest
        if stream == "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
            sys.stdout = open(1, "w", closefd=False)
        else:
            os.close({"out": 1, "err": 2}[stream])
            setattr(sys, {"out": "stdout", "err": "stderr"}[stream], None)  # as Python begins without it
        sys.exit(main())
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(2, f"{words}: {status}\\n".encode())
"""
"""A command for each argument, with the standard output closed (`>&-`) or full, or the standard error closed."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full device is Linux's")
def test_a_closed_or_full_output_takes_a_line(files, tmp_path):
    closed = ("out evaluate usual.npz", "out plan --queries 9 --dim 3 --json", "out --version")
    others = ("out report usual.npz -o page.html", "full plan --queries 9 --dim 3 --json", "err evaluate nowhere.npz")
    command = [sys.executable, "-c", STREAMS, *closed, *others]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "Traceback" not in done.stderr
    said = done.stderr.splitlines()
    for name, line, status in (("evaluate", *said[:2]), ("plan", *said[2:4])):
        assert line.startswith(f"fewshot {name}: ")
        assert missing_facts(line, ("standard output", "closed", "> /dev/null")) == []
        assert status == f"{closed[name == 'plan']}: 1"
    assert "out --version: 1" in said
    assert f"{others[0]}: 0" in said  # its result is a file
    assert (tmp_path / "page.html").stat().st_size > 1000
    assert missing_facts(said[-3], ("fewshot plan", "standard output", "No space left on device")) == []
    assert said[-2] == f"{others[1]}: 1"
    assert said[-1] == f"{others[2]}: 1"
    assert done.stdout == ""


def test_the_traceback_comes_back_on_demand(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "nowhere.npz"]) == 1
    assert last_line(capsys).startswith("fewshot evaluate: nowhere.npz ")
    monkeypatch.setenv(DEBUG, "1")
    with refused(ValueError, "nowhere.npz"):
        main(["evaluate", "nowhere.npz"])


def test_an_error_of_another_package_says_how_to_find_it():
    with pytest.raises(ValueError, match="x") as caught:
        int("x")
    assert missing_facts(one_line(caught.value), ("'x'", "ValueError", f"{DEBUG}=1")) == []


@pytest.mark.parametrize(
    "text",
    ["trainer:\n  callbacks: &all\n  - *all\n", "data: &data\n  init_args: *data\n", "model: &model\n  head: *model\n"],
)
def test_a_configuration_inside_itself_is_refused_in_words(text, tmp_path, capsys):
    loop = tmp_path / "loop.yaml"
    loop.write_text(text)
    assert main(["fit", "--config", str(loop)]) == 1
    said = capsys.readouterr().err
    assert "loop.yaml" in said
    assert "alias" in said


def test_a_file_of_a_hundred_thousand_brackets_is_refused_in_words(tmp_path, capsys):
    brackets = tmp_path / "training_dynamics.json"
    brackets.write_text("[" * 100_000)
    assert main(["compare", str(brackets), str(brackets), "--test", "false"]) == 1
    said = capsys.readouterr().err
    assert "training_dynamics.json" in said
    assert "FEWSHOT_DEBUG" not in said
