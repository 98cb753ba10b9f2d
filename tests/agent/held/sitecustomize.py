"""Found by an agent that a test starts: holds it ahead of an operation for as long as the test wants. See gate.py."""

import os
import time
from pathlib import Path

GATE = Path(os.environ["KEEPSTEP_TEST_GATE"])


def guarded(name):
    real = getattr(os, name)

    def operation(*args, **kwargs):
        shut = GATE / f"shut-{name}"
        if shut.exists():
            (GATE / f"reached-{name}").touch()
            while shut.exists():
                time.sleep(0.002)
        return real(*args, **kwargs)

    return operation


for name in ("pwrite", "link"):
    setattr(os, name, guarded(name))
