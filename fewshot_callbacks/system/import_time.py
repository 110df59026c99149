"""When this process began to import the package: a file that is newer may not be what Python runs.

`fewshot_callbacks/__init__.py` imports this module before any other.
"""

from __future__ import annotations

import time

STARTED = time.time()
