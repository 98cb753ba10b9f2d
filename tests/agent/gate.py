"""An agent that stops at a chosen instant: in the middle of writing, or right before a step exists."""

from __future__ import annotations

import os
from pathlib import Path

from tests.helpers.agents import wait_until

WRITING, COMMITTING = "pwrite", "link"
"""Ahead of each write to a file, and ahead of putting the manifest of a step in place."""


class Gate:
    """Holds agents that are started after ``install``, at the instants that are shut. ``folder`` is made."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder

    def install(self) -> Gate:
        """Agents that this process starts from now on stop at the gate."""
        os.environ["KEEPSTEP_TEST_GATE"] = str(self.folder)
        os.environ["PYTHONPATH"] = str(Path(__file__).parent / "held")
        return self

    def remove(self) -> None:
        """Agents that this process starts from now on do not."""
        for name in ("KEEPSTEP_TEST_GATE", "PYTHONPATH"):
            os.environ.pop(name, None)

    def shut(self, instant: str) -> None:
        (self.folder / f"reached-{instant}").unlink(missing_ok=True)
        (self.folder / f"shut-{instant}").touch()

    def wait_reached(self, instant: str) -> None:
        wait_until((self.folder / f"reached-{instant}").exists, what=f"an agent at {instant}")

    def open(self, instant: str) -> None:
        (self.folder / f"shut-{instant}").unlink()
