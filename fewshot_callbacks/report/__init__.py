"""Functions that write the report of an evaluation as one self-contained HTML file.

`findings` computes the contents, `items` makes the thumbnails, and `page` writes the file from `templates/`. `trials` writes
the report of a verification. `rows` writes the queries of an evaluation as a Parquet file.
"""

from fewshot_callbacks.system.extras import required_extra

with required_extra("report", "fewshot_callbacks.report"):
    import jinja2  # noqa: F401
    import PIL  # noqa: F401

from fewshot_callbacks.report.findings import Model, RetrievedItem
from fewshot_callbacks.report.items import ReportItems, image_files, pictures_of_files
from fewshot_callbacks.report.page import WrittenReport, check_writable, write_report
from fewshot_callbacks.report.rows import write_rows
from fewshot_callbacks.report.settings import ReportSettings
from fewshot_callbacks.report.trials import trial_figures, write_trials

__all__ = [
    "Model",
    "ReportItems",
    "ReportSettings",
    "RetrievedItem",
    "WrittenReport",
    "check_writable",
    "image_files",
    "pictures_of_files",
    "trial_figures",
    "write_report",
    "write_rows",
    "write_trials",
]
