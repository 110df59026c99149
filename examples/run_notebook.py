"""Run examples/colab.ipynb from top to bottom, as continuous integration does; FEWSHOT_QUICK=1 shortens the training."""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

path = Path(__file__).with_name("colab.ipynb")
os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
notebook = nbformat.read(path, as_version=4)
with tempfile.TemporaryDirectory() as folder:
    client = NotebookClient(notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": folder}})
    client.execute()
    pictures = sum("image/png" in out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", []))
    print(f"{path.name}: {len(notebook.cells)} cells ran, {pictures} pictures")
    sys.exit(0 if pictures else "the notebook has drawn no picture")
