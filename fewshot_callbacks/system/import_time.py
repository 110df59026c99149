"""The time at which this process began to import the package. Python may not run the current content of a newer file.

`fewshot_callbacks/__init__.py` imports this module before any other module.
"""

from __future__ import annotations

import time

STARTED = time.time()
