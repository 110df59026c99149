"""Run examples/colab.ipynb from top to bottom, as continuous integration does.

python examples/run_notebook.py             # FEWSHOT_QUICK=1 shortens the training runs
python examples/run_notebook.py --write     # also save printed text and figures in the notebook
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--write", action="store_true", help="store the outputs: printed text and pictures, no progress bars"
)
options = parser.parse_args()

path = Path(__file__).with_name("colab.ipynb")
os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
notebook = nbformat.read(path, as_version=4)
with tempfile.TemporaryDirectory() as folder:
    client = NotebookClient(notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": folder}})
    client.execute()
pictures = 0
for cell in notebook.cells:
    if cell.cell_type == "code":
        cell.metadata.pop("execution", None)  # the times
        cell.outputs = [
            output for output in cell.outputs if output.get("name") == "stdout" or "image/png" in output.get("data", {})
        ]
        pictures += sum("image/png" in output.get("data", {}) for output in cell.outputs)
if options.write:
    nbformat.write(notebook, path)
print(f"{path.name}: {len(notebook.cells)} cells ran, {pictures} pictures")
sys.exit(0 if pictures else "the notebook has drawn no picture")
