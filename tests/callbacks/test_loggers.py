"""Pictures, points and texts arrive in every logger, and so do the keys of the monitors.

The loggers are the real ones, with their packages off-line: what they wrote is read back from their files. LitLogger
alone talks to a stand-in, because its package works with an account and a network only.
"""

import json
import random
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CometLogger, CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.callbacks import DiscriminantRatioMonitor, EmbeddingMap, RetrievalMonitor, ScorePlots
from fewshot_callbacks.callbacks._conduct import FailurePolicy
from fewshot_callbacks.callbacks._loggers import log_embedding, log_figures
from tests.callbacks.models import Net, loader, messages_of, trainer
from tests.integration_packages import integration
from tests.messages import missing_facts, warned

NAME, ACCEPTED = "val/panels@worst 5", "val/panels_worst 5"
RED = (200, 10, 30)
POINTS = 30


def policy() -> FailurePolicy:
    return FailurePolicy("Panels", None)


def red_figure() -> Figure:
    """All of one colour, so that a picture can be recognised after every change of format."""
    return Figure(figsize=(3, 2), dpi=20, facecolor=[channel / 255 for channel in RED])


def is_the_red_figure(path: Any) -> bool:
    pixels = np.asarray(Image.open(path).convert("RGB"))
    return pixels.shape == (40, 60, 3) and bool((pixels == RED).all())


class Shows(Callback):
    """What a callback of pictures does at the end of an epoch."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        log_figures(trainer, {NAME: red_figure}, policy())
        columns = {"label": ["a b", "c\td"] * (POINTS // 2), "number": range(POINTS)}
        images = torch.zeros(POINTS, 3, 20, 20)
        log_embedding(trainer, "val/points", torch.randn(POINTS, 4), columns, policy(), images)


MONITOR = {
    "label_groups": 3,
    "metrics": (
        *(*DEFAULT_METRICS, "map@3_min", "map@10_min", "ir_recall@1", "ir_recall@10", "precision@2", "ndcg@3"),
        *("prototype_accuracy", "macro_mAP", "grouped_recall@2", "auc_pr", "fnmr@fmr0.1", "fnmr@fmr1e-05", "eer"),
    ),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """One short fit that logs to five loggers at once; then what was logged, shown and said, and where it lies."""
    wandb = integration("wandb")
    integration("mlflow")
    integration("comet_ml")
    folder = tmp_path_factory.mktemp("loggers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for setting in (
            *("WANDB_MODE=offline", "WANDB_SILENT=true", "WANDB_CONSOLE=off"),
            *("COMET_START_ONLINE=false", "COMET_LOGGING_CONSOLE=ERROR", "MLFLOW_ALLOW_FILE_STORE=true"),
        ):
            patch.setenv(*setting.split("="))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loggers = [
                TensorBoardLogger(folder / "tensorboard"),
                WandbLogger(save_dir=folder, offline=True),
                MLFlowLogger(tracking_uri=f"file:{folder}/mlflow"),
                CometLogger(project="tests", offline_directory=str(folder / "comet")),
                CSVLogger(folder / "csv"),
            ]
            monitors = [RetrievalMonitor(**MONITOR), DiscriminantRatioMonitor()]
            a_trainer = trainer(*monitors, Shows(), logger=loggers, log_every_n_steps=1)
            a_trainer.fit(Net(), loader(), [loader(), loader()])
            loggers[3].experiment.end()
            wandb.finish()
            wandb.teardown()  # else its file may be read before it is complete
        metrics = {key: float(value) for key, value in a_trainer.callback_metrics.items()}
        yield SimpleNamespace(folder=folder, loggers=loggers, metrics=metrics, said=messages_of(caught))


def assert_same(logged: dict[str, Any], metrics: dict[str, float]) -> None:
    found = {key: float(value) for key, value in logged.items() if key in metrics}
    assert found == pytest.approx(metrics, rel=1e-6, nan_ok=True)


def test_no_logger_refuses_a_key_a_picture_or_points(run: SimpleNamespace) -> None:
    hard = ("recall@1", "recall@precision0.95", "fnmr@fmr0.1", "fnmr@fmr1e-05")  # keys that a logger may refuse
    assert {f"val/{name}/dataloader_idx_1" for name in hard} <= set(run.metrics)
    assert not [words for words in run.said if "picture" in words or "points" in words]


def test_tensorboard_and_a_logger_of_tables_have_the_picture_at_the_step_of_the_metrics(run, tmp_path) -> None:
    accumulator = EventAccumulator(run.loggers[0].log_dir).Reload()
    [picture] = accumulator.Images(ACCEPTED)
    (tmp_path / "picture.png").write_bytes(picture.encoded_image_string)
    assert is_the_red_figure(tmp_path / "picture.png")
    assert picture.step == accumulator.Scalars("val/mAP/dataloader_idx_0")[0].step
    [path] = Path(run.loggers[4].log_dir).rglob("*.png")
    assert path == Path(run.loggers[4].log_dir) / "pictures" / ACCEPTED / f"step={picture.step:06d}.png"
    assert is_the_red_figure(path)


def test_weights_and_biases_has_the_picture_and_every_key(run: SimpleNamespace) -> None:
    [path] = run.folder.glob("wandb/offline-run-*/files/media/images/val/panels_worst 5_*.png")
    assert is_the_red_figure(path)
    record = next(run.folder.glob("wandb/offline-run-*/*.wandb")).read_bytes()
    assert [key for key in (ACCEPTED, *run.metrics) if key.encode() not in record] == []


def test_mlflow_has_the_picture_and_every_value_without_the_at_sign(run: SimpleNamespace) -> None:
    """MLflow refuses it, Lightning leaves it out, and no two of our keys become one."""
    client, run_id = run.loggers[2].experiment, run.loggers[2].run_id
    [path] = [file.path for file in client.list_artifacts(run_id, "images") if file.path.endswith(".png")]
    assert Path(path).name.startswith("val~panels_worst 5+step+")
    assert is_the_red_figure(client.download_artifacts(run_id, path))
    spelled = {key.replace("@", ""): value for key, value in run.metrics.items()}
    assert len(spelled) == len(run.metrics)
    assert_same(client.get_run(run_id).data.metrics, spelled)


def test_comet_has_the_picture_and_every_value(run: SimpleNamespace, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(run.folder.glob("comet/*.zip"))) as archive:
        messages = [json.loads(line) for line in archive.read("messages.json").decode().splitlines()]
        uploads = [message["payload"] for message in messages if message["type"] == "file_upload"]
        pictures = [upload for upload in uploads if upload["upload_type"] == "visualization"]
        paths = [archive.extract(picture["file_path"], tmp_path) for picture in pictures]
    assert {picture["additional_params"]["figName"] for picture in pictures} == {ACCEPTED}
    # where Comet was imported before TensorBoard, it also copies what TensorBoard is given, in colours that it stretches
    assert [is_the_red_figure(path) for path in paths].count(True) == 1
    metrics = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
    assert_same({metric["metricName"]: metric["metricValue"] for metric in metrics}, run.metrics)


def test_tensorboard_has_the_points_with_their_words_and_thumbnails(run: SimpleNamespace) -> None:
    folder = Path(run.loggers[0].log_dir)
    [points] = folder.rglob("tensors.tsv")
    assert np.loadtxt(points).shape == (POINTS, 4)
    words = (points.parent / "metadata.tsv").read_text().splitlines()
    assert (words[:3], len(words)) == (["label\tnumber", "a b\t0", "c d\t1"], 1 + POINTS)
    sprite = np.asarray(Image.open(points.parent / "sprite.png"))
    assert sprite.shape == (120, 120, 3)  # 6 by 6 places of 20 by 20
    assert (sprite[10] == 0)[:20].all()
    settings = (folder / "projector_config.pbtxt").read_text()
    assert (settings.count("embeddings {"), settings.count("single_image_dim: 20")) == (1, 2)


class Unknown(Logger):
    """Somebody else's logger, whose runs share a folder."""

    name, version, save_dir = "mine", 3, None

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("logger", "name", "place"),
    [(Unknown(), NAME, f"mine/3/pictures/{ACCEPTED}"), (False, "/../../a//./b:c", "pictures/a/b_c")],
    ids=["unknown", "none, and a name that leads out"],
)
def test_without_a_known_logger_the_picture_is_a_file_of_the_run(tmp_path, logger, name, place) -> None:
    log_figures(trainer(default_root_dir=tmp_path / "run", logger=logger), {name: red_figure}, policy())
    [path] = tmp_path.rglob("*.png")
    assert path == tmp_path / "run" / place / "step=000000.png"
    assert is_the_red_figure(path)


class WithLogImage(Unknown):
    """As the loggers of W&B, SwanLab and stable-pretraining are."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: Any) -> None:
        assert isinstance(images, list)
        self.taken += [(key, image, step) for image in images]


class WithWriter(Unknown):
    """Whose experiment is a writer of TensorBoard, but whose class is not Lightning's."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

        def add_image(key: str, pixels: Any, step: int, dataformats: str) -> None:
            assert dataformats == "HWC"
            self.taken.append((key, Image.fromarray(pixels), step))

        self.experiment = SimpleNamespace(add_image=add_image)


class WithAnotherMethod(Unknown):
    """Its method of this name takes one image."""

    def log_image(self, name: str, image: Any) -> None:
        pytest.fail("this is not the method that is meant")


class WithoutExperiment(Unknown):
    @property
    def experiment(self) -> Any:
        raise RuntimeError("no connection")


@pytest.mark.parametrize("kind", [WithLogImage, WithWriter])
def test_a_logger_of_any_class_that_can_show_pictures_is_given_them(kind: Any, tmp_path: Path) -> None:
    logger = kind()
    log_figures(trainer(default_root_dir=tmp_path, logger=logger), {NAME: red_figure}, policy())
    [(key, image, step)] = logger.taken
    assert (key, image.size, image.getpixel((0, 0)), step) == (ACCEPTED, (60, 40), RED, 0)
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize("kind", [WithAnotherMethod, WithoutExperiment])
def test_a_logger_that_cannot_show_pictures_gets_a_file(kind: Any, tmp_path: Path) -> None:
    log_figures(trainer(default_root_dir=tmp_path, logger=kind()), {NAME: red_figure}, policy())
    [path] = tmp_path.rglob("*.png")
    assert is_the_red_figure(path)


@pytest.mark.parametrize(
    ("loggers", "told"),
    [
        (
            lambda folder: [CSVLogger(folder), Unknown(), TensorBoardLogger(folder)],
            ("CSVLogger", "Unknown"),
        ),
        (lambda folder: False, ("Trainer", "logger")),
        (lambda folder: [TensorBoardLogger(folder), WithLogImage()], None),
    ],
)
def test_one_message_says_that_pictures_become_files(
    loggers: Any, told: tuple[str, ...] | None, tmp_path: Path, caplog: Any
) -> None:
    callbacks = [RetrievalMonitor(label_groups=None), ScorePlots(max_share=None), EmbeddingMap(max_share=None)]
    run = trainer(*callbacks, logger=loggers(tmp_path), default_root_dir=tmp_path)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        run.validate(Net(), loader(), verbose=False)
    where = "pictures/<name>/step=<step>.png"
    messages = [text for text in caplog.messages if not missing_facts(text, (where,))]
    if told is None:
        assert messages == []
    else:
        [message] = messages
        assert missing_facts(message, (*told, "WandbLogger", "log_image(key, images, step)")) == []
        assert message.count("TensorBoardLogger") == 1  # as one that shows them


def test_the_lightning_logger_is_given_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for its package."""
    loggers = pytest.importorskip("lightning.pytorch.loggers.litlogger", reason="new in Lightning 2.6.1")
    taken = []

    class Experiment:
        def __init__(self, **settings: Any) -> None: ...

        def __getitem__(self, key: str) -> Any:
            return SimpleNamespace(append=lambda value, step: taken.append((key, value, step)))

        def print_url(self) -> None: ...

    monkeypatch.setitem(sys.modules, "litlogger", SimpleNamespace(Experiment=Experiment, Image=lambda data: data))
    log_figures(trainer(logger=loggers.LitLogger(tmp_path, name="name")), {NAME: red_figure}, policy())
    [(key, image, step)] = taken
    assert (key, image.size, image.getpixel((0, 0)), step) == (ACCEPTED, (60, 40), RED, 0)


def test_a_fast_run_draws_and_leaves_nothing(tmp_path: Path) -> None:
    drawn: list[Figure] = []
    for logger in (True, False):
        a_trainer = trainer(fast_dev_run=True, default_root_dir=tmp_path, logger=logger)
        log_figures(a_trainer, {NAME: lambda: drawn.append(red_figure()) or drawn[-1]}, policy())
    assert len(drawn) == 2
    assert not list(tmp_path.iterdir())


def test_the_first_rank_alone_draws_and_asks_the_others_for_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Trainer, "log_dir", property(lambda trainer: pytest.fail("all ranks would have to ask")))
    a_trainer = trainer(logger=CSVLogger(tmp_path))
    log_figures(a_trainer, {NAME: red_figure}, policy())
    assert len(list(tmp_path.rglob("*.png"))) == 1
    monkeypatch.setattr(type(a_trainer), "is_global_zero", False)
    log_figures(a_trainer, {NAME: pytest.fail}, policy())


def test_drawing_leaves_random_states_as_they_were(tmp_path: Path) -> None:
    def draws() -> tuple[Any, ...]:
        return random.random(), np.random.rand(), torch.rand(())  # noqa: NPY002 - as a figure of somebody else may

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)

    seed()
    expected = draws()
    seed()
    log_figures(trainer(default_root_dir=tmp_path), {NAME: lambda: draws() and red_figure()}, policy())
    assert draws() == expected


def words_of(log: Callable[..., None], *arguments: Any, steps: int = 2) -> list[str]:
    """What is warned of while the same is logged at several steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            arguments[0].fit_loop.epoch_loop._batches_that_stepped = step
            log(*arguments)
    return messages_of(caught)


def test_a_refused_picture_is_a_file_and_one_warning_for_each_kind(tmp_path: Path, monkeypatch: Any) -> None:
    logger = TensorBoardLogger(tmp_path, name="run", version=0)
    errors = iter([RuntimeError("of TensorBoard"), RuntimeError("again"), OSError("another")])

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise next(errors)

    monkeypatch.setattr(logger.experiment, "add_image", refuse)
    a_trainer = trainer(logger=[logger, CSVLogger(tmp_path, name="csv")])
    said = words_of(log_figures, a_trainer, {NAME: red_figure}, policy(), steps=3)
    errors_said = ("RuntimeError: of TensorBoard", 0), ("OSError: another", 2)
    for message, (error, step) in zip(said, errors_said, strict=True):
        facts = "Panels", "TensorBoardLogger", f"'{ACCEPTED}'", error, f"pictures/{ACCEPTED}/step=00000{step}.png"
        assert missing_facts(message, facts) == []
    assert [len(list((tmp_path / name).rglob("*.png"))) for name in ("run", "csv")] == [3, 3]


def test_a_picture_replaces_one_of_this_package_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "pictures" / ACCEPTED / "step=000000.png"
    for _ in range(2):
        log_figures(trainer(default_root_dir=tmp_path), {NAME: red_figure}, policy())
    assert is_the_red_figure(path)
    Image.new("L", (4, 4)).save(path)
    before = path.read_bytes()
    with warned(UserWarning, "Panels", f"pictures/{ACCEPTED}/step=000000.png", "FileExistsError"):
        log_figures(trainer(default_root_dir=tmp_path), {NAME: red_figure}, policy())
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_written_to_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "pictures").write_text("a file where the folder should be")
    with warned(UserWarning, f"pictures/{ACCEPTED}/step=000000.png", "Trainer(default_root_dir='runs')"):
        log_figures(trainer(default_root_dir=tmp_path), {NAME: red_figure}, policy())


def test_points_of_one_column_have_no_heading_and_wrong_ones_are_told_once(tmp_path: Path) -> None:
    a_trainer = trainer(logger=TensorBoardLogger(tmp_path))
    log_embedding(a_trainer, "points", torch.randn(3, 2).bfloat16(), {"label": "abc"}, policy())
    [words] = tmp_path.rglob("metadata.tsv")
    assert words.read_text() == "a\nb\nc\n"
    [told] = words_of(log_embedding, a_trainer, "points", torch.randn(3, 2), {"label": "ab"}, policy())
    assert missing_facts(told, ("Panels", "TensorBoardLogger", "'points'", "AssertionError")) == []
