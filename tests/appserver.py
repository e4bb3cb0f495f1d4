"""The dashboard as a process of its own, for tests in a real browser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def app_server(store: Path, root: Path | None, home: Path) -> Iterator[str]:
    """Address of a dashboard that shows a store and writes below the root; nothing of the user's own home is read."""
    config_dir = None if root is None else str(root)
    program = f"from calib.dashboard import run_app; run_app({str(store)!r}, 0, {config_dir!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env={**os.environ, "HOME": str(home)}
    )
    try:
        assert process.stderr is not None
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, f"the server ended with code {process.wait()}"
            found = re.search(r"http://\S+:\d+", line)
        yield found[0]
    finally:
        process.terminate()
        process.communicate(timeout=30)
