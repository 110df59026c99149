"""An HTML report of each evaluated set, in a fit or a test."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.callbacks._loggers import Drawing
from fewshot_callbacks.callbacks._pictures import ImageReader, Images, PictureCallback
from fewshot_callbacks.callbacks._viewers import EvaluatedSet, Names
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.addresses import is_address, upload
from fewshot_callbacks.files.outputs import free_path, is_report
from fewshot_callbacks.functional import RetrievalReport
from fewshot_callbacks.plots.panels import Scale
from fewshot_callbacks.report import Model, ReportSettings, WrittenReport, write_report
from fewshot_callbacks.settings import FilePath
from fewshot_callbacks.trainer.lightning import LightningModule, Trainer, rank_zero_info
from fewshot_callbacks.trainer.logs import run_folder


class ReportWriter(PictureCallback):
    """Writes each set that a `RetrievalMonitor` has evaluated to one HTML file, as `fewshot report` does.

    It needs a `RetrievalMonitor` in the same Trainer. The file contains the metrics, an adjustable threshold, the
    weakest classes, failed queries, suspects and near duplicates (docs/evaluate/report.md). Pictures are read from the
    data set if item i of the loader is item i of the data set; otherwise there are none. The first process gathers all
    embeddings and writes. Items with several labels, and an evaluation with `max_queries`, give a warning instead of a
    report. Nothing is written in the sanity check. An error never ends the run.

    Examples:
        >>> from pathlib import Path
        >>> import torch
        >>> from fewshot_callbacks import RetrievalMonitor
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.encoder = torch.nn.Identity()
        ...     def validation_step(self, batch, batch_idx):
        ...         self.encoder(batch[0])
        >>> items = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
        >>> loader = DataLoader(TensorDataset(items, torch.arange(12) // 3), batch_size=4)
        >>> writer = ReportWriter("report-{epoch}.html", images=lambda dataset, index: f"item {index}")
        >>> callbacks = [RetrievalMonitor(source="encoder"), writer]
        >>> from tempfile import TemporaryDirectory
        >>> options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        >>> with TemporaryDirectory() as folder:
        ...     trainer = Trainer(callbacks=callbacks, accelerator="cpu", default_root_dir=folder, **options)
        ...     _ = trainer.validate(Model(), loader, verbose=False)
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['report-0.html']

    Args:
        path: Path of the file, in which {epoch}, {step}, {prefix} and {suffix} (of the metrics' keys) are filled in. A
            relative path starts from the folder of the first logger, or without one from the Trainer's
            `default_root_dir`. Without {epoch}, each evaluation replaces the previous report. A file that is not a
            report is left unchanged: the report then gets the next free name, such as `report-2.html`, with a warning.
            In a bucket (s3://...) it is then not written.
        images: A function of (data set, index) that returns an image or a text. By default the first part of a sample,
            or its entry `image`.
        mean: Mean of the images' normalisation, which is undone: one value, or one for each channel.
        std: Standard deviation of that normalisation, in the same form.
        names: Names of the classes: a mapping from labels, or a list for the labels 0, 1, 2, ... By default the data
            set's attribute `classes`, or the labels themselves.
        every_n_epochs: Write in at most one of this number of epochs, beginning with the first.
        max_share: Skip epochs until all pictures and reports together have taken at most this fraction of the run time,
            in (0, 1). The first second never counts. None skips no epoch. `pictures/share_of_time` logs the fraction.
        prefix: Write only the sets whose keys begin with this prefix: `val`, `test`, or `val/t2i` for a
            `RetrievalMonitor` with a name. By default all sets.
        settings: Size and content of the report. See `ReportSettings`.

    Raises:
        ValueError: If a setting is out of range.
    """

    _shows_in_loggers = False

    def __init__(
        self,
        path: FilePath = "report-{prefix}{suffix}.html",
        *,
        images: Images | None = None,
        mean: Scale | None = None,
        std: Scale | None = None,
        names: Names | None = None,
        every_n_epochs: int = 1,
        max_share: float | None = 0.05,
        prefix: str | None = None,
        settings: ReportSettings | None = None,
    ) -> None:
        super().__init__(every_n_epochs, max_share, prefix, names, ImageReader(images, mean, std))
        self.path = os.fspath(path)
        self.settings = settings or ReportSettings()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run.

        Raises:
            UsageError: If there is no `RetrievalMonitor` to show, or the path cannot be filled in.
        """
        super().setup(trainer, pl_module, stage)
        # After the first epoch, a wrong field would only be a warning.
        try:
            self.path.format(epoch=0, step=0, prefix="", suffix="")
        except (KeyError, IndexError, ValueError) as error:
            raise UsageError(
                f"ReportWriter(path={self.path!r}) cannot be filled in ({type(error).__name__}: {error}). The fields are "
                "{epoch}, {step}, {prefix} and {suffix}."
            ) from error

    def _figures(self, trainer: Trainer, evaluated: EvaluatedSet) -> Mapping[str, Drawing]:
        """Write the report, and return no figure for the loggers."""
        report = evaluated.report
        if not report.classes:
            raise InputError("a report needs one label per item, but these items have several")
        model = self._model(evaluated)
        # Slashes in prefix or suffix would make folders.
        file = self.path.format(
            epoch=evaluated.epoch,
            step=trainer.global_step,
            prefix=evaluated.prefix.replace("/", "_"),
            suffix=evaluated.suffix.replace("/", "_"),
        )
        folder = run_folder(trainer)
        if is_address(folder) and not Path(file).is_absolute():
            address = posixpath.join(folder, file)
            with TemporaryDirectory() as local_folder:
                result = self._write(Path(local_folder) / posixpath.basename(file), report, model)
                upload(result.path, address, is_report)
            rank_zero_info(f"ReportWriter: {address}")
            return {}
        path = self._replaceable_path(Path(folder) / file)
        path.parent.mkdir(parents=True, exist_ok=True)
        result = self._write(path, report, model)
        rank_zero_info(f"ReportWriter: {result.path}")
        return {}

    def _write(self, path: Path, report: RetrievalReport, model: Model) -> WrittenReport:
        return write_report(
            path,
            report,
            model.queries,
            model.gallery,
            title=f"Report of {model.name}",
            name=model.name,
            settings=self.settings,
        )

    def _replaceable_path(self, path: Path) -> Path:
        """Return `path`, or the next free name if `path` is a file that is not a report."""
        if not path.is_file():
            # `write_report` raises an error for a folder.
            return path
        free = free_path(path, is_report)
        if free != path:
            fact = f"ReportWriter: {path} is not a report of this package and is left unchanged."
            self._policy.warn(f"{fact} The report is {free.name} in the same folder.", kind=str(path))
        return free
