"""Pictures, points and texts arrive in every logger, and so do the keys of the monitors.

The loggers are the real ones, with their packages off-line: what they wrote is read back from their files. LitLogger
alone talks to a stand-in, because its package works with an account and a network only.
"""

import contextlib
import json
import random
import sys
import time
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

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.callbacks import DiscriminantRatioMonitor, RetrievalMonitor
from fewshot_callbacks.callbacks._conduct import FailurePolicy, Stopwatch
from fewshot_callbacks.callbacks._loggers import log_embedding, log_figures
from tests.callbacks.models import Net, loader, said, trainer

NAME, ACCEPTED = "val/panels@worst 5", "val/panels_worst 5"
RED = (200, 10, 30)
POINTS = 30


def policy() -> FailurePolicy:
    return FailurePolicy("Panels", None)


def red_figure(width: float = 3, height: float = 2) -> Figure:
    """All of one colour, so that a picture can be recognised after every change of format."""
    return Figure(figsize=(width, height), dpi=20, facecolor=[channel / 255 for channel in RED])


def is_the_red_figure(path: Any, tolerance: int = 0) -> bool:
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    return pixels.shape == (40, 60, 3) and bool((abs(pixels - RED) <= tolerance).all())


class Shows(Callback):
    """What a callback of pictures does at the end of an epoch."""

    def __init__(self) -> None:
        self.watch, self.policy = Stopwatch(), policy()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with self.watch.running():
            log_figures(trainer, {NAME: red_figure}, self.policy)
            columns = {"label": ["a b", "c\td"] * (POINTS // 2), "number": range(POINTS)}
            images = torch.zeros(POINTS, 3, 20, 20)
            log_embedding(trainer, "val/points", torch.randn(POINTS, 4), columns, self.policy, images)


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
    folder = tmp_path_factory.mktemp("loggers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB_CONSOLE", "off")
        patch.setenv("COMET_START_ONLINE", "false")
        patch.setenv("COMET_LOGGING_CONSOLE", "ERROR")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loggers = [
                TensorBoardLogger(folder / "tensorboard"),
                WandbLogger(save_dir=folder, offline=True),
                MLFlowLogger(tracking_uri=f"file:{folder}/mlflow"),
                CometLogger(project="tests", offline_directory=str(folder / "comet")),
                CSVLogger(folder / "csv"),
            ]
            shows = Shows()
            monitors = [RetrievalMonitor(**MONITOR), DiscriminantRatioMonitor()]
            a_trainer = trainer(*monitors, shows, logger=loggers, log_every_n_steps=1)
            a_trainer.fit(Net(), loader(), [loader(), loader()])
            loggers[3].experiment.end()
            import wandb

            wandb.finish()
            wandb.teardown()  # else its file may be read before it is complete
        metrics = {key: float(value) for key, value in a_trainer.callback_metrics.items()}
        yield SimpleNamespace(folder=folder, loggers=loggers, metrics=metrics, said=said(caught), watch=shows.watch)


def events(run: SimpleNamespace) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(run.loggers[0].log_dir)
    return accumulator.Reload()


# ------------------------------------------------------------------------------------------------------------- pictures


def test_tensorboard_has_the_picture_at_the_step_of_the_metrics(run: SimpleNamespace, tmp_path: Path) -> None:
    accumulator = events(run)
    [picture] = accumulator.Images(ACCEPTED)
    (tmp_path / "picture.png").write_bytes(picture.encoded_image_string)
    assert is_the_red_figure(tmp_path / "picture.png")
    assert picture.step == accumulator.Scalars("val/mAP/dataloader_idx_0")[0].step


def test_weights_and_biases_has_the_picture(run: SimpleNamespace) -> None:
    [path] = run.folder.glob("wandb/offline-run-*/files/media/images/val/panels_worst 5_*.png")
    assert is_the_red_figure(path)
    record = next(run.folder.glob("wandb/offline-run-*/*.wandb")).read_bytes()
    assert ACCEPTED.encode() in record


def test_mlflow_has_the_picture(run: SimpleNamespace) -> None:
    client = run.loggers[2].experiment
    artifacts = [Path(file.path) for file in client.list_artifacts(run.loggers[2].run_id, "images")]
    [path] = [path for path in artifacts if path.suffix == ".png"]
    assert path.name.startswith("val~panels_worst 5+step+")
    assert is_the_red_figure(client.download_artifacts(run.loggers[2].run_id, str(path)))


def test_comet_has_the_picture(run: SimpleNamespace, tmp_path: Path) -> None:
    uploads = [message["payload"] for message in comet_messages(run) if message["type"] == "file_upload"]
    pictures = [upload for upload in uploads if upload["upload_type"] == "visualization"]
    assert {picture["additional_params"]["figName"] for picture in pictures} == {ACCEPTED}
    with zipfile.ZipFile(next(run.folder.glob("comet/*.zip"))) as archive:
        paths = [archive.extract(picture["file_path"], tmp_path) for picture in pictures]
    # where Comet was imported before TensorBoard, it also copies what TensorBoard is given, in colours that it stretches
    assert [is_the_red_figure(path) for path in paths].count(True) == 1


def comet_messages(run: SimpleNamespace) -> list[dict[str, Any]]:
    [path] = run.folder.glob("comet/*.zip")
    with zipfile.ZipFile(path) as archive:
        return [json.loads(line) for line in archive.read("messages.json").decode().splitlines()]


def test_a_logger_of_tables_has_the_picture_beside_them(run: SimpleNamespace) -> None:
    [path] = Path(run.loggers[4].log_dir).rglob("*.png")
    assert path.relative_to(run.loggers[4].log_dir).parent == Path("pictures") / ACCEPTED
    assert path.name == f"step={events(run).Images(ACCEPTED)[0].step:06d}.png"
    assert is_the_red_figure(path)


def test_nothing_was_refused(run: SimpleNamespace) -> None:
    assert not [words for words in run.said if "picture" in words or "points" in words]


class Unknown(Logger):
    """Somebody else's logger, whose runs share a folder."""

    name, version, save_dir = "mine", 3, None

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("logger", "name", "place"),
    [
        (False, NAME, f"pictures/{ACCEPTED}"),
        (Unknown(), NAME, f"mine/3/pictures/{ACCEPTED}"),
        (False, "/../../a//./b:c", "pictures/a/b_c"),
    ],
    ids=["none", "unknown", "a name that leads out"],
)
def test_without_a_known_logger_the_picture_is_a_file_of_the_run(
    tmp_path: Path, logger: Any, name: str, place: str
) -> None:
    log_figures(trainer(default_root_dir=tmp_path / "run", logger=logger), {name: red_figure}, policy())
    [path] = tmp_path.rglob("*.png")
    assert path == tmp_path / "run" / place / "step=000000.png"
    assert is_the_red_figure(path)


def test_the_lightning_logger_is_given_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for its package."""
    loggers = pytest.importorskip("lightning.pytorch.loggers.litlogger", reason="new in Lightning 2.6")
    taken = []

    class Series:
        def __init__(self, key: str) -> None:
            self.key = key

        def append(self, value: Any, step: int) -> None:
            taken.append((self.key, value, step))

    class Experiment:
        def __init__(self, **settings: Any) -> None: ...

        def __getitem__(self, key: str) -> Series:
            return Series(key)

        def print_url(self) -> None: ...

    stand_in = SimpleNamespace(Experiment=Experiment, Image=lambda data: data)
    monkeypatch.setitem(sys.modules, "litlogger", stand_in)
    logger = loggers.LitLogger(tmp_path, name="name")
    log_figures(trainer(logger=logger), {NAME: red_figure}, policy())
    [(key, image, step)] = taken
    assert (key, image.size, image.getpixel((0, 0)), step) == (ACCEPTED, (60, 40), RED, 0)


def test_a_fast_run_draws_and_leaves_nothing(tmp_path: Path) -> None:
    drawn = []

    def draw() -> Figure:
        drawn.append(1)
        return red_figure()

    for logger in (True, False):
        log_figures(trainer(fast_dev_run=True, default_root_dir=tmp_path, logger=logger), {NAME: draw}, policy())
    assert drawn == [1, 1]
    assert not list(tmp_path.iterdir())


def test_the_first_rank_alone_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_trainer = trainer(default_root_dir=tmp_path)
    monkeypatch.setattr(type(a_trainer), "is_global_zero", False)
    log_figures(a_trainer, {NAME: pytest.fail}, policy())
    assert not list(tmp_path.iterdir())


def test_the_first_rank_asks_the_others_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "log_dir", property(lambda trainer: pytest.fail("all ranks would have to ask")))
    log_figures(trainer(logger=CSVLogger(tmp_path)), {NAME: red_figure}, policy())
    assert len(list(tmp_path.rglob("*.png"))) == 1


def test_random_states_are_what_they_were(tmp_path: Path) -> None:
    def draw() -> Figure:
        random.random()
        np.random.rand()  # noqa: NPY002 - as a figure of somebody else may
        torch.rand(())
        return red_figure()

    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    from_torch = torch.rand((), generator=torch.Generator().manual_seed(1))
    expected = random.Random(1).random(), np.random.RandomState(1).rand(), from_torch
    log_figures(trainer(default_root_dir=tmp_path), {NAME: draw}, policy())
    assert (random.random(), np.random.rand(), torch.rand(())) == expected  # noqa: NPY002


# ------------------------------------------------------------------------------------------------------------- failures


def words_of(log: Callable[..., None], *arguments: Any, steps: int = 2) -> list[str]:
    """What is warned of while the same is logged at several steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            arguments[0].fit_loop.epoch_loop._batches_that_stepped = step
            log(*arguments)
    return said(caught)


def test_a_refused_picture_is_a_file_and_one_warning_for_each_kind(tmp_path: Path, monkeypatch: Any) -> None:
    logger = TensorBoardLogger(tmp_path, name="run", version=0)
    errors = iter([RuntimeError("of TensorBoard"), RuntimeError("again"), OSError("another")])

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise next(errors)

    monkeypatch.setattr(logger.experiment, "add_image", refuse)
    a_policy, a_trainer = policy(), trainer(logger=[logger, CSVLogger(tmp_path, name="csv")])
    assert words_of(log_figures, a_trainer, {NAME: red_figure}, a_policy, steps=3) == [
        "Panels: TensorBoardLogger did not take the picture 'val/panels_worst 5' (RuntimeError: of TensorBoard). See "
        "pictures/val/panels_worst 5/step=000000.png in the folder of the run instead. (Shown once for such errors.)",
        "Panels: TensorBoardLogger did not take the picture 'val/panels_worst 5' (OSError: another). See "
        "pictures/val/panels_worst 5/step=000002.png in the folder of the run instead. (Shown once for such errors.)",
    ]
    assert len(list((tmp_path / "run").rglob("*.png"))) == 3
    assert len(list((tmp_path / "csv").rglob("*.png"))) == 3


def test_a_picture_that_cannot_be_drawn_leaves_the_others(tmp_path: Path) -> None:
    def draw() -> Figure:
        raise ValueError("nothing to draw")

    a_policy, a_trainer = policy(), trainer(default_root_dir=tmp_path)
    assert words_of(log_figures, a_trainer, {"bad": draw, "good": red_figure}, a_policy) == [
        "Panels: The picture 'bad' could not be drawn (ValueError: nothing to draw). The run goes on without it. "
        "(Shown once for such errors.)"
    ]
    assert len(list(tmp_path.rglob("*.png"))) == 2


def test_a_folder_that_cannot_be_written_to_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "pictures").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match=r"could not be written .*default_root_dir='runs'"):
        log_figures(trainer(default_root_dir=tmp_path), {NAME: red_figure}, policy())


# --------------------------------------------------------------------------------------------- TensorBoard's own: points


def test_tensorboard_has_the_points_with_their_words_and_thumbnails(run: SimpleNamespace) -> None:
    folder = Path(run.loggers[0].log_dir)
    [points] = folder.rglob("tensors.tsv")
    assert np.loadtxt(points).shape == (POINTS, 4)
    words = (points.parent / "metadata.tsv").read_text().splitlines()
    assert words[:3] == ["label\tnumber", "a b\t0", "c d\t1"]
    assert len(words) == 1 + POINTS
    sprite = np.asarray(Image.open(points.parent / "sprite.png"))
    assert sprite.shape == (120, 120, 3)  # 6 by 6 places of 20 by 20
    assert (sprite[10] == 0)[:20].all()
    settings = (folder / "projector_config.pbtxt").read_text()
    assert settings.count("embeddings {") == 1
    assert settings.count("single_image_dim: 20") == 2


def test_points_of_one_column_have_no_heading(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    log_embedding(trainer(logger=logger), "points", torch.randn(3, 2).bfloat16(), {"label": "abc"}, policy())
    [words] = tmp_path.rglob("metadata.tsv")
    assert words.read_text() == "a\nb\nc\n"


def test_wrong_points_are_told_once(tmp_path: Path) -> None:
    a_trainer, a_policy = trainer(logger=TensorBoardLogger(tmp_path)), policy()
    [words] = words_of(log_embedding, a_trainer, "points", torch.randn(3, 2), {"label": "ab"}, a_policy)
    assert words.startswith("Panels: TensorBoardLogger did not take the points 'points' (AssertionError: #labels")


# ----------------------------------------------------------------------------------------------------------------- keys


def assert_same(logged: dict[str, Any], metrics: dict[str, float]) -> None:
    assert set(metrics) <= set(logged)
    for key, value in metrics.items():
        assert float(logged[key]) == pytest.approx(value, rel=1e-6, nan_ok=True), key


def test_every_value_is_in_comet(run: SimpleNamespace) -> None:
    hard = ("recall@1", "recall@precision0.95", "fnmr@fmr0.1", "fnmr@fmr1e-05")  # what a logger may refuse
    assert {f"val/{name}/dataloader_idx_1" for name in hard} <= set(run.metrics)
    messages = [message["payload"]["metric"] for message in comet_messages(run) if message["type"] == "metric_msg"]
    assert_same({metric["metricName"]: metric["metricValue"] for metric in messages}, run.metrics)


def test_every_key_is_in_weights_and_biases(run: SimpleNamespace) -> None:
    record = next(run.folder.glob("wandb/offline-run-*/*.wandb")).read_bytes()
    assert [key for key in run.metrics if key.encode() not in record] == []


def test_every_value_is_in_mlflow_without_the_at_sign(run: SimpleNamespace) -> None:
    """MLflow refuses it, Lightning leaves it out, and no two of our keys become one."""
    spelled = {key.replace("@", ""): value for key, value in run.metrics.items()}
    assert len(spelled) == len(run.metrics)
    assert_same(run.loggers[2].experiment.get_run(run.loggers[2].run_id).data.metrics, spelled)
    told = [words for words in run.said if words.startswith("MLFlow only allows")]
    assert len(set(told)) == sum("@" in key for key in run.metrics)


# ----------------------------------------------------------------------------------------------------------------- time


def test_a_stopwatch_adds_up_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = Stopwatch()
    for seconds in (1.0, 2.0):
        with contextlib.suppress(KeyError), watch.running():
            now[0] += seconds
            raise KeyError
        now[0] += 3.0
    assert (watch.seconds, watch.share) == (3.0, 3.0 / 9.0)
