"""Where embeddings and labels are found: outputs, batches, submodules; and what is said where they are not."""

import inspect
import math
import os
import re
import subprocess
import sys
import warnings
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fewshot_callbacks.callbacks import DiscriminantRatioMonitor, GeneralizationGapMonitor
from fewshot_callbacks.callbacks._conduct import FailurePolicy, UsageError
from fewshot_callbacks.callbacks.embeddings import EmbeddingReader, read_flag
from tests.callbacks.models import EveryBatch, EveryEpoch, Net, hooks, items, loader, measured, retrieval, said, trainer

E, L = torch.randn(4, 3), torch.tensor([5, 5, 9, 9])


def reader(source: Any = ("embeddings", "labels"), labels: Any = None) -> EmbeddingReader:
    return EmbeddingReader(source, labels, "Monitor")


class Calls(LightningModule):
    """Calls its encoder once for each given number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        self.recurrent = nn.LSTM(3, 2)

    def embeddings_of(self, source: str, *rows: int, labels: int = 4, batch: Any = None) -> tuple[Tensor, Tensor]:
        listening = reader(source)
        listening.attach(self)
        try:
            listening.expect()
            for part in E.split(list(rows)) if rows else []:
                self.get_submodule(source)(part)
            return listening.read(None, (E, L[:labels]) if batch is None else batch, "validation_step")
        finally:
            listening.detach()
            assert hooks(self) == 0


# ------------------------------------------------------------------------------------------------- where embeddings are


@pytest.mark.parametrize(
    ("outputs", "was"),
    [
        (None, "None"),
        (torch.tensor(1.0), r"a tensor of shape \(\) and type torch.float32"),
        ({"loss": 1, "z": E}, "a mapping with the keys 'loss', 'z'"),
        ({}, "a mapping with the keys none"),
        ((E, L), "a tuple of 2"),
    ],
)
def test_missing_embeddings_name_what_was_there_and_the_argument_that_fixes_it(outputs: Any, was: str) -> None:
    expected = (
        rf"Monitor found no embeddings: training_step returned {was}; expected 'embeddings'\. "
        r"Return .*\"embeddings\": embeddings.* or say where they are: source=\('other', 'keys'\), "
        r"source=lambda outputs, batch: .*, or source='name.of.a.submodule'"
    )
    with pytest.raises(ValueError, match=expected):
        reader().read(outputs, (E, L), "training_step")


@pytest.mark.parametrize(
    ("asked", "outputs", "meant"),
    [
        (("emb", "labels"), {"loss": 1, "embeddings": E, "labels": L}, ("embeddings", "labels")),
        (("embeddings", "labels"), {"loss": 1, "embedding": E, "label": L}, ("embedding", "label")),
        (("embeddings", "labels"), {"emb": E}, ("emb", "labels")),
        (("feature", "target"), {"features": E, "targets": L}, ("features", "targets")),
    ],
)
def test_a_key_that_is_near_is_proposed(asked: Any, outputs: Any, meant: Any) -> None:
    with pytest.raises(UsageError, match=re.escape(f"expected {asked[0]!r}. Did you mean source={meant!r}?")):
        reader(asked).read(outputs, (E, L), "validation_step")


# ------------------------------------------------------------------------------------------------------- named submodule


def test_calls_whose_rows_add_up_to_the_labels_are_joined() -> None:
    net = Calls()
    assert net.embeddings_of("encoder", 1, 3)[0].allclose(net.encoder(E))


def test_calls_that_do_not_add_up_are_refused() -> None:
    expected = (
        r"validation_step called the submodule 'encoder' 2 times, with 1, 3 rows, for 3 labels\. "
        r"Pass source=lambda outputs, batch: \(embeddings, labels\)"
    )
    with pytest.raises(ValueError, match=expected):
        Calls().embeddings_of("encoder", 1, 3, labels=3)


def test_a_submodule_that_returns_no_tensor() -> None:
    with pytest.raises(
        ValueError, match=r"'recurrent' returns a tuple of 2, not a tensor. Name the entry .* or pass source=lambda"
    ):
        Calls().embeddings_of("recurrent", 4)


@pytest.mark.parametrize(
    ("name", "names"), [("encodr", "encoder"), ("encoder.9", "encoder"), ("zzz", "encoder, recurrent")]
)
def test_an_unknown_submodule_suggests_near_names(name: str, names: str) -> None:
    expected = (
        rf"Monitor\(source='{re.escape(name)}'\): Calls has no submodule of that name. It has, for instance, {names}"
        r".*For keys of the step's output pass two: source=\('embeddings', 'labels'\)"
    )
    with pytest.raises(ValueError, match=expected):
        reader(name).attach(Calls())


def test_only_the_calls_of_the_expected_step_are_kept() -> None:
    net, listening = Calls(), reader("encoder")
    listening.attach(net)
    listening.attach(net)  # setup runs before each fit, validate and test
    assert hooks(net) == 1
    net.encoder(E)  # before the step
    listening.expect()
    net.encoder(-E)  # an aborted step
    listening.expect()
    net.encoder(E)
    embeddings, _ = listening.read(None, (E, L), "validation_step")
    assert embeddings.equal(net.encoder(E).detach())
    listening.detach()
    assert hooks(net) == 0


# ---------------------------------------------------------------------------------------------------- where labels are

Pair = namedtuple("Pair", ["images", "classes"])


@pytest.mark.parametrize(
    ("labels", "outputs", "batch"),
    [
        (None, {"labels": L}, (E, -L)),  # the step knows best
        (None, {}, (E, L)),
        (None, {}, [E, L]),
        (None, {}, Pair(E, L)),
        (None, {}, {"image": E, "labels": L}),
        ("class", {"labels": -L}, {"class": L}),  # what was asked for comes first
        (2, {"labels": -L}, (E, E, L)),
        (-1, {}, (E, E, L)),
        (0, {}, (L, E)),
        (lambda batch: batch["deep"]["labels"], {"labels": -L}, {"deep": {"labels": L}}),
    ],
)
def test_labels_are_found(labels: Any, outputs: dict[str, Tensor], batch: Any) -> None:
    _, found = reader(labels=labels).read({"embeddings": E} | outputs, batch, "validation_step")
    assert found.codes.equal(L)


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        ((E, E, L), "a tuple of 3"),
        (E, "a tensor of shape (4, 3) and type torch.float32"),
        ({"x": E, "y": L}, "a mapping with the keys 'x', 'y'"),
        (None, "None"),
        ("ab", "a str"),
        ((E, E + 1), "two tensors of one shape, such as two views of each item"),
        (3, "a int"),
    ],
)
def test_missing_labels_name_the_batch_and_the_argument(batch: Any, what: str) -> None:
    expected = (
        f"Monitor found no labels: test_step returned none under 'labels', and the batch is {what}. Say where they are "
        "in the batch: Monitor(labels='key'), labels=1 for a position, or a function of it."
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        reader().read({"embeddings": E}, batch, "test_step")


@pytest.mark.parametrize(
    ("labels", "batch", "what"),
    [
        ("y", {"x": E}, r"\(labels='y'\): the batch is a mapping with the keys 'x' and has"),
        (2, (E, L), r"\(labels=2\): the batch is a tuple of 2 and has"),
        ("y", (E, L), r"\(labels='y'\): the batch is a tuple of 2 and has"),
    ],
)
def test_labels_that_are_not_where_the_argument_says(labels: Any, batch: Any, what: str) -> None:
    with pytest.raises(ValueError, match=f"Monitor{what} no such entry"):
        reader(labels=labels).read({"embeddings": E}, batch, "test_step")


# ------------------------------------------------------------------------------------------------- what is no embedding


@pytest.mark.parametrize(
    ("embeddings", "labels", "words"),
    [
        (list("abcd"), L, "the embeddings of test_step are a list of 4, not a tensor.*hold words, such as 'a'"),
        (None, L, "the embeddings of test_step are None, not a tensor"),
        (E, ["a", "b", "a", None], r"the labels of test_step are a list of 4.*1 of 4 labels is missing.*at index 3"),
        (E, ["a", "b", "a", 1], r"the labels of test_step are a list of 4.*mix words and integers"),
        (E.reshape(2, 3, 2), L[:2], r"a tensor of shape \(2, 3, 2\).*flatten them: embeddings.flatten\(1\)"),
        (E[0], L, r"a tensor of shape \(3,\) .*one floating-point vector for each"),
        (E.long(), L, "type torch.int64; expected one floating-point vector for each"),
        (E, L[:3], r"test_step gave 4 embeddings, but 3 labels; expected one for each"),
        (E, L[:, None].expand(4, 2), r"labels has shape \(4, 2\). Pass labels.argmax"),
        (
            E,
            L.float(),
            r"labels of test_step are a tensor .* type torch.float32. .*needs integer labels.*labels.long\(\)",
        ),
    ],
)
def test_what_is_no_embedding_or_label_is_named(embeddings: Any, labels: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reader().read({"embeddings": embeddings, "labels": labels}, None, "test_step")


# ------------------------------------------------------------------------------------- settings refused in the constructor


@pytest.mark.parametrize(
    ("source", "words"),
    [
        *(
            (keys, "two keys are needed, such as ('embeddings', 'labels')")
            for keys in (("a",), ("a", "b", "c"), (1, 2), [])
        ),
        *((other, "is none of: two keys of the step's output, the name of a submodule, a") for other in (3, None)),
    ],
)
def test_a_source_of_no_known_form(source: Any, words: str) -> None:
    made = EmbeddingReader.__new__(EmbeddingReader)  # as users make it, without the type checks of the tests
    with pytest.raises(ValueError, match=re.escape(words)):
        inspect.unwrap(EmbeddingReader.__init__)(made, source, None, "Monitor")


# ------------------------------------------------------------------------------------------------- the flag of a gallery


def test_the_flag_is_looked_up_in_the_output_first() -> None:
    mask = torch.tensor([True, False, True, True])
    assert read_flag("g", {"g": mask}, {"g": ~mask}, len(mask), "Monitor").equal(mask)
    assert read_flag("g", {"embeddings": E}, {"g": mask.long()}, len(mask), "Monitor").equal(mask)
    assert read_flag(lambda outputs, batch: batch[1] == 5, None, (E, L), len(L), "Monitor").equal(L == 5)


@pytest.mark.parametrize(("flag", "what"), [([1, 0], "a list of 2"), (E, r"a tensor of shape \(4, 3\)")])
def test_a_flag_that_is_no_mask(flag: Any, what: str) -> None:
    with pytest.raises(ValueError, match=f"gallery gave {what}.*; expected one boolean for each item"):
        read_flag("g", {"g": flag}, None, 4, "Monitor")


# ------------------------------------------------------------------------------------------------------- what is said


def test_an_error_is_said_once_and_another_again() -> None:
    policy = FailurePolicy("Monitor", strict=False)
    rows = ValueError("rows 3 to 5 of the embeddings.")

    def handle(*errors: Exception) -> None:
        for error in errors:
            policy.handle(error, "val/J is NaN.")

    with pytest.warns(UserWarning, match="val/J is NaN") as warned:
        handle(rows, rows, RuntimeError("out of memory"), KeyError(), rows)
    end = " (Shown once; Monitor(strict=True) raises instead.)"
    assert said(warned) == [
        f"val/J is NaN. rows 3 to 5 of the embeddings.{end}",
        f"val/J is NaN. RuntimeError: out of memory{end}",
        f"val/J is NaN. KeyError: KeyError{end}",
    ]


# ----------------------------------------------------------------------------------------------------- in a Trainer


class Returns(Net):
    """Returns from a step, and finds in its batch, what the test wants."""

    def __init__(self, returns: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.returns = returns

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        points, labels = batch
        return self.returns(self.embed(points), labels)


@pytest.mark.parametrize(
    ("returns", "settings"),
    [
        (lambda z, y: {"embeddings": z, "labels": y}, {}),
        (lambda z, y: {"embeddings": z}, {}),
        (lambda z, y: {"z": z, "y": y, "embeddings": -z[:1], "labels": -y}, {"source": ("z", "y")}),
        (lambda z, y: (z, y), {"source": lambda outputs, batch: outputs}),
        (lambda z, y: z, {"source": lambda outputs, batch: (outputs, batch[1])}),
        (lambda z, y: None, {"source": "encoder"}),
        (lambda z, y: z.sum(), {"source": "encoder.3", "labels": 1}),
        (lambda z, y: {"embeddings": z}, {"labels": lambda batch: batch[1]}),
    ],
)
def test_every_source_gives_the_same_values(returns: Any, settings: dict[str, Any]) -> None:
    net = Returns(returns)
    [logged] = trainer(retrieval(**settings)).validate(net, loader(), verbose=False)
    expected = measured(*net.by_hand(items()))
    assert logged == pytest.approx({f"val/{name}": value for name, value in expected.items()}, rel=1e-5)
    assert hooks(net) == 0


def test_an_unknown_submodule_ends_the_fit_before_it_starts() -> None:
    with pytest.raises(ValueError, match=r"Net has no submodule of that name. It has, for instance, encoder"):
        trainer(retrieval(source="encder")).validate(Net(), loader(), verbose=False)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        *((lambda *_, r=r: r, r"source returned .*; it must return \(embeddings, lab") for r in (E, None, (E, L, L))),
        (lambda outputs, _: outputs["z"], "source raised KeyError: 'z'. step returned a mapping with the keys 'loss'"),
    ],
)
def test_a_function_that_fails_or_returns_no_pair_is_named(source: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reader(source).read({"loss": torch.zeros(())}, [1, 2], "step")


# ------------------------------------------------------------------------------------------ mistakes that cannot heal


class OnlyLoss(Net):
    """As most modules are written: its steps return a loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(batch, batch_idx)["embeddings"].sum()


class TestOnly(Net):
    """Calls its encoder in a test alone."""

    __test__ = False

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...


MISTAKES: list[tuple[Callable[[], Net], Callable[..., Any], str]] = [
    (OnlyLoss, retrieval, "RetrievalMonitor found no embeddings: validation_step returned a tensor of shape"),
    (Net, partial(retrieval, source=("z", "labels")), "the keys 'embeddings', 'labels'; expected 'z'. Return"),
    (Net, partial(retrieval, labels="species"), "labels='species'): the batch is a list of 2 and has no such entry"),
    (Net, partial(retrieval, gallery="shop"), "gallery='shop'): neither what the step returned"),
    (Net, partial(retrieval, gallery=3), "gallery=3): there is no such loader; there are 'dataloader"),
    (TestOnly, partial(retrieval, source="encoder"), "validation_step did not call the submodule 'encoder'"),
    (OnlyLoss, DiscriminantRatioMonitor, "DiscriminantRatioMonitor found no embeddings: "),
    (Net, partial(GeneralizationGapMonitor, embed=lambda net, batch: net.embed(batch[0])), "pass training_data="),
    (Net, GeneralizationGapMonitor, "Net has no forward method, and embed is not given. Pass embed="),
]


@pytest.mark.parametrize(("sanity", "batches"), [(1, 0), (0, 4)])
@pytest.mark.parametrize(("net", "monitor", "words"), MISTAKES)
def test_a_mistake_that_cannot_heal_ends_the_fit_at_its_first_sign(
    net: Callable[[], Net], monitor: Callable[..., Any], words: str, sanity: int, batches: int
) -> None:
    trained = EveryBatch()
    run = trainer(monitor(), trained, num_sanity_val_steps=sanity, max_epochs=3)
    with pytest.raises(
        UsageError, match=re.escape(words) + r".*\(\w+Monitor\(strict=False\) warns instead, and logs NaN"
    ):
        run.fit(net(), loader(), loader())
    assert len(trained.outputs) == (0 if monitor is DiscriminantRatioMonitor else batches)
    if sanity:
        patient = trainer(monitor(strict=False), num_sanity_val_steps=sanity)
        with pytest.warns(UserWarning, match=re.escape(words)):
            patient.fit(net(), loader(), loader())
        assert patient.global_step == 4


def test_a_step_that_has_given_embeddings_before_may_give_them_again() -> None:
    class Forgetful(Net):
        """The second validation has none, as a step has that skips what has diverged."""

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return None if self.current_epoch == 1 else super().validation_step(batch, batch_idx)

    epochs = EveryEpoch()
    with pytest.warns(UserWarning, match="val/mAP and the other values of this set are NaN.*found no embeddings"):
        trainer(retrieval(), epochs, max_epochs=3).fit(Forgetful(), loader(), loader())
    assert [math.isnan(value) for value in epochs.values] == [False, True, False]


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_first_training_batch_that_lightning_skips_may_be_followed_by_others() -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            return None if batch_idx in (0, 2) else outputs

    batches = EveryBatch()
    with pytest.warns(UserWarning, match="train/J and .* NaN.*training_step returned a mapping with the keys none"):
        trainer(DiscriminantRatioMonitor(), batches).fit(Skips(), loader(), loader())
    assert [math.isnan(value) for value in batches.logged] == [True, False, True, False]


def test_a_manual_training_step_that_returns_nothing_cannot_heal() -> None:
    class Manual(Net):
        automatic_optimization = False  # type: ignore[assignment]

        def training_step(self, batch: Any, batch_idx: int) -> None: ...

    with pytest.raises(UsageError, match="found no embeddings: training_step returned a mapping with the keys none"):
        trainer(DiscriminantRatioMonitor()).fit(Manual(), loader(), loader())


# ----------------------------------------------------------------------------------- every fit says what it has to say


DIVERGED = items().tensors[0] * math.nan


@pytest.mark.parametrize("same_monitor", [True, False])
def test_a_second_fit_in_one_process_warns_again(same_monitor: bool) -> None:
    """With Python's own filter, which shows a warning once for each place in the code."""
    data = TensorDataset(DIVERGED, items().tensors[1])

    def make() -> tuple[Any, ...]:
        return retrieval(), DiscriminantRatioMonitor()

    monitors, told = make(), []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            warnings.filterwarnings("ignore", message=".*does not have many workers")
            trainer(*(monitors if same_monitor else make()), max_epochs=2).fit(Net(), loader(), loader(data))
        told.append([text for text in said(caught) if "NaN" in text])
    assert len(told[0]) == 2
    assert told[0] == told[1]


SCRIPT = """
import torch
from lightning.pytorch import LightningModule, Trainer
from fewshot_callbacks import RetrievalMonitor

class Points(LightningModule):
    def validation_step(self, batch, batch_idx):
        return {"embeddings": batch, "labels": torch.tensor([0, 0, 0, 1])}

trainer = Trainer(logger=False, enable_progress_bar=False, accelerator="cpu", callbacks=RetrievalMonitor(label_groups=None))
trainer.validate(Points(), torch.utils.data.DataLoader(torch.rand(4, 2), 4), verbose=False)
"""


def test_a_warning_shows_the_line_of_the_user(tmp_path: Path) -> None:
    """Not the line of the package that warns, which nobody can change."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, env=environment, timeout=300
    )
    [warned] = re.findall(r"^(.*): UserWarning: val: 1 of 4 queries have no match.*\n(.*)$", done.stderr, re.M)
    assert warned == (f"{script}:11", "  " + SCRIPT.splitlines()[10])
    assert "fewshot_callbacks" not in done.stderr
