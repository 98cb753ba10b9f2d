"""Disks of a test's own: mounted in a namespace that ends with the process, so that nothing is left behind by a death.

``in_namespace(folder, fn, *args)`` forks a process that may mount, runs ``fn(*args)`` there, and returns its result.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000
PRIVATE = (1 << 18) | (1 << 14)


def in_namespace(folder: Path, fn: Callable[..., Any], *args: Any) -> Any:
    """The result of ``fn(*args)`` in a forked process that may mount. That process must have one thread only."""
    result = folder / "result-of-namespace"
    pid = os.fork()
    if pid == 0:
        answer: tuple[Any, str] = (None, "")
        try:
            enter()
            answer = (fn(*args), "")
        except BaseException:
            answer = (None, traceback.format_exc())
        finally:
            result.write_bytes(pickle.dumps(answer))
            os._exit(0)
    os.waitpid(pid, 0)
    value, error = pickle.loads(result.read_bytes())
    assert not error, error
    return value


def enter() -> None:
    """This process gets mounts of its own; as another user than root, a user namespace as well."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    flags = NEW_MOUNTS if user == 0 else NEW_MOUNTS | NEW_USER
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "no namespace")
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    if libc.mount(b"none", b"/", None, PRIVATE, None):
        raise OSError(ctypes.get_errno(), "mounts cannot be made private")


def mount(*args: str) -> None:
    """Runs ``mount``; fails with what it said."""
    done = subprocess.run(["mount", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"mount {' '.join(args)}: {done.stderr}"


def may(*commands: str) -> bool:
    """Whether these shell commands work in a namespace of their own."""
    flags = ["-m"] if os.getuid() == 0 else ["-U", "-r", "-m"]
    try:
        script = " && ".join(commands)
        return subprocess.run(["unshare", *flags, "sh", "-c", script], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
