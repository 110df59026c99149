"""Writes an HTML report of each evaluated set, in a fit or a test."""

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
    """Writes each set that a `RetrievalMonitor` has evaluated as one HTML file, as `fewshot report` does.

    The file holds the metrics, an adjustable threshold, the weakest classes, failed queries, suspects and near
    duplicates; see docs/evaluate/report.md. Pictures are read from the data set if item i of the loader is its item i;
    otherwise there are none. With several processes, the embeddings are gathered and the first process writes. Multi-label
    targets and an evaluation with `max_queries` get a warning instead of a report. Nothing is written in the sanity
    check, and an error never ends the run.

    Args:
        path: Path of the file; {epoch}, {step}, {prefix} and {suffix} (of the metrics' keys) are filled in. A relative
            path starts from the folder of the first logger, or else from the Trainer's `default_root_dir`, which may be in a
            bucket (s3://...), where a file that is no report is left and no report is written. Without
            {epoch}, each evaluation replaces the report of the one before. A file that is no report is left as it is: the
            report has the next name, such as `report-2.html`, with a warning.
        images: A function of (data set, index) that returns an image, or a text; by default the first part of a sample, or
            its entry `image`.
        mean: Mean of the images' normalisation, which is undone: one value, or one for each channel.
        std: Standard deviation of that normalisation, in the same form.
        names: Names of the classes, as a mapping from labels or a list for labels 0, 1, 2, ...; by default the data
            set's attribute `classes`.
        every_n_epochs: Write at most in one of this number of epochs, beginning with the first.
        max_share: Skip epochs until all pictures and reports together have taken at most this share of the run time, in
            (0, 1); None never skips an epoch. None is skipped before they have taken a second.
        prefix: Write only the sets whose keys begin with this prefix: `val`, `test`, or `val/t2i` for a `RetrievalMonitor`
            with a name; by default all.
        settings: Size and content of the report; see `ReportSettings`.

    Raises:
        ValueError: If a setting is out of range.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from fewshot_callbacks import RetrievalMonitor
        >>> callbacks = [RetrievalMonitor(), ReportWriter("report-{epoch}.html")]
        >>> trainer = Trainer(callbacks=callbacks, logger=False, accelerator="cpu")
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
        # A wrong field ends the run here; after the first epoch it would only be a warning.
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
            raise InputError("a report shows items with one label each, and these have several")
        model = self._model(evaluated)
        # Slashes in prefix or suffix would name other folders.
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
        """Return `path`, or the next free name in its folder if it is a file that is not a report."""
        if not path.is_file():
            # `write_report` raises if it is a folder.
            return path
        free = free_path(path, is_report)
        if free != path:
            fact = f"ReportWriter: {path} is no report of this package and is left as it is."
            self._policy.warn(f"{fact} The report is {free.name} beside it.", kind=str(path))
        return free
