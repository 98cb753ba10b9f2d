"""Every error keepstep raises, as one tree.

    CheckpointError                         code            exit
    ├─ UsageError (ValueError)              usage              2   the call is wrong
    ├─ ClosedError (RuntimeError)           closed             2   used after close()
    ├─ StepNotFoundError (FileNotFoundError) step-not-found    3   no such committed step
    ├─ StepExistsError (FileExistsError)    step-exists        4   that step is already committed
    ├─ MismatchError (ValueError)           mismatch           5   state and checkpoint differ; all differences listed
    ├─ UnsafeValueError (TypeError)         unsafe-value       5   a value cannot be stored without pickle
    │  └─ UnsafeFileError                   unsafe-file        5   a file could run code of its own
    ├─ FormatError (ValueError)             format             6   newer or unknown format version
    ├─ CorruptError (ValueError)            corrupt            7   digest, hole, overlap, truncation
    ├─ StorageError (OSError)               storage            8   the storage refused an operation
    ├─ RankFailedError (RuntimeError)       rank-failed        9   another rank failed; says which and why
    ├─ CommitTimeoutError (TimeoutError)    commit-timeout    10   ranks that did not arrive in time
    ├─ StagingError (MemoryError)           staging           11   no memory for the arena, or it changed meanwhile
    ├─ AgentError (ConnectionError)         agent             12   the background agent died or cannot be reached
    ├─ RunOwnedError (RuntimeError)         run-owned         13   another job is writing to this root
    ├─ DrillError (RuntimeError)            drill             14   a resumed run was not the run that would have been
    └─ UnprovenError (RuntimeError)         unproven          15   a drill could not judge: it says why

Preempted is not an error: it ends a training loop on purpose, after the last step was saved.

A message says, in this order: what failed and where, what was expected and what was found, what is true on disk now,
and what to do. Low layers raise with what they know; the layer that knows the step and the rank adds it as a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = [
    "AgentError",
    "CheckpointError",
    "ClosedError",
    "CommitTimeoutError",
    "CorruptError",
    "DamageWarning",
    "DrillError",
    "FormatError",
    "MismatchError",
    "PositionWarning",
    "Preempted",
    "RankFailedError",
    "RunOwnedError",
    "StagingError",
    "StepExistsError",
    "StepNotFoundError",
    "StorageError",
    "UnprovenError",
    "UnsafeFileError",
    "UnsafeValueError",
    "UsageError",
    "listed",
]

SHOWN = 20


def listed(lines: Iterable[str], shown: int = SHOWN) -> str:
    """The first ``shown`` lines, indented, and a count of the rest."""
    items = list(lines)
    text = "".join(f"\n  - {line}" for line in items[:shown])
    rest = len(items) - shown
    return f"{text}\n  … and {rest} more" if rest > 0 else text


class DamageWarning(UserWarning):
    """A committed step was skipped because it is damaged; the message says what is wrong with it."""


class PositionWarning(UserWarning):
    """A data source that is being saved cannot say where it stands; the message says what a resume will do."""


class CheckpointError(Exception):
    """Anything keepstep raises on purpose. Catch this to catch them all."""

    code = "checkpoint"
    exit_status = 1
    remedy = "Read the message: it names the step, the key or the rank, and what is on disk."


class UsageError(CheckpointError, ValueError):
    """The call is wrong: arguments that contradict each other, a state that cannot be saved as it is."""

    code = "usage"
    exit_status = 2
    remedy = "Correct the call. Nothing was written and nothing in the target was changed."


class ClosedError(CheckpointError, RuntimeError):
    """A Checkpointer or an opened checkpoint was used after close()."""

    code = "closed"
    exit_status = 2
    remedy = "Keep the object open for as long as it is used, or make a new one."


class StepNotFoundError(CheckpointError, FileNotFoundError):
    """No committed step is there: nothing was saved, or what was found was never committed."""

    code = "step-not-found"
    exit_status = 3
    remedy = (
        "Look at `keepstep ls ROOT`. To start from zero beside unfinished attempts, call restore(allow_fresh=True)."
    )


class StepExistsError(CheckpointError, FileExistsError):
    """That step is already committed, and this run has no right to replace it."""

    code = "step-exists"
    exit_status = 4
    remedy = "Save under another path or root, restore from the existing steps first, or pass overwrite=True."


class MismatchError(CheckpointError, ValueError):
    """State and checkpoint differ, or ranks differ from each other. ``mismatches`` holds every difference."""

    code = "mismatch"
    exit_status = 5
    remedy = "Compare with `keepstep show STEP`; nothing in the target was changed."

    def __init__(self, what: str, mismatches: Iterable[str] = (), then: str = "") -> None:
        self.mismatches = tuple(mismatches)
        super().__init__(what + listed(self.mismatches) + (f"\n{then}" if then else ""))


class UnsafeValueError(CheckpointError, TypeError):
    """A value in the state has a type that cannot be stored without pickle; refused while saving."""

    code = "unsafe-value"
    exit_status = 5
    remedy = "Register the class with ks.register, or store plain values instead. Nothing was written."

    _what = "the state holds values that cannot be stored safely:"

    def __init__(self, refused: Iterable[str]) -> None:
        self.refused = tuple(refused)
        super().__init__(self._what + listed(self.refused))


class UnsafeFileError(UnsafeValueError):
    """A file of another program holds what is not read, for it could run code of its own; refused while loading."""

    code = "unsafe-file"
    remedy = (
        "Where you trust the file: declare its classes safe to torch (torch.serialization.add_safe_globals), or pass the"
        " registry that knows its extensions. Nothing of it was run, and the files are as they were."
    )
    _what = "the files hold what is not read, for it could run code of their own:"


class FormatError(CheckpointError, ValueError):
    """The file is of a newer or unknown format version."""

    code = "format"
    exit_status = 6
    remedy = "Install a keepstep that knows this version; the files were not touched."


class CorruptError(CheckpointError, ValueError):
    """What is on disk is not what was written: wrong digest, missing or short file, hole or overlap."""

    code = "corrupt"
    exit_status = 7
    remedy = "Run `keepstep verify STEP`; restore() falls back to the next older good step."


class StorageError(CheckpointError, OSError):
    """The storage refused an operation. ``errno`` is kept; ``operation`` and ``key`` say what and where."""

    code = "storage"
    exit_status = 8
    remedy = "Free space, repair permissions, the mount or the way to the store, and try again; committed steps stay."

    def __init__(self, operation: str, key: str, cause: OSError) -> None:
        self.operation = operation
        self.key = key
        detail = cause.strerror or str(cause)
        super().__init__(cause.errno, f"{operation} of {key!r} failed: {detail} (errno {cause.errno})")

    def __str__(self) -> str:
        """The message alone; the errno is part of it."""
        return str(self.args[1])


class RankFailedError(CheckpointError, RuntimeError):
    """Another rank failed, so this one stopped too. ``failures`` maps rank to what it said.

    ``codes`` maps rank to the code of its error; empty for an error that is not of this tree.
    """

    code = "rank-failed"
    exit_status = 9
    remedy = "Look at the named rank's own error; nothing of this attempt was committed."

    def __init__(self, what: str, failures: Mapping[int, str], codes: Mapping[int, str] | None = None) -> None:
        self.what = what
        self.failures = dict(failures)
        self.codes = dict(codes or {})
        lines = (f"rank {rank}: {text}" for rank, text in sorted(self.failures.items()))
        super().__init__(what + listed(lines))


class CommitTimeoutError(CheckpointError, TimeoutError):
    """Some ranks did not arrive within the deadline. ``missing`` names them."""

    code = "commit-timeout"
    exit_status = 10
    remedy = "Every rank must make the same call; raise deadline_s only if a rank was merely slow."

    def __init__(self, what: str, missing: Iterable[int]) -> None:
        self.missing = tuple(missing)
        super().__init__(what)


class StagingError(CheckpointError, MemoryError):
    """The copy failed: no memory for the arena (gives bytes asked, budget and free), or a tensor changed meanwhile."""

    code = "staging"
    exit_status = 11
    remedy = (
        "Give a larger memory_budget_bytes or free host memory. Where a loop changes tensors by hand, call state.fence()"
        ' before it does, or use staging="block".'
    )


class AgentError(CheckpointError, ConnectionError):
    """The background agent died, cannot be started, or cannot be reached."""

    code = "agent"
    exit_status = 12
    remedy = (
        "The next save starts a new agent. Look at agent.<host>.log beside the run, and at the memory of the machine;"
        ' background="thread" needs no agent.'
    )


class RunOwnedError(CheckpointError, RuntimeError):
    """Another job that is alive on this machine is writing to this root; the message names it."""

    code = "run-owned"
    exit_status = 13
    remedy = "Stop the other job, or give this one a root of its own. Nothing was written."


class DrillError(CheckpointError, RuntimeError):
    """A drill has broken a promise: a run that was interrupted did not go on as the one that was not."""

    code = "drill"
    exit_status = 14
    remedy = "Look at the first difference and its likely causes; traces and logs of the drill are kept."


class UnprovenError(CheckpointError, RuntimeError):
    """A drill could judge nothing: the script fails by itself, leaves no trace, or is another one at each run."""

    code = "unproven"
    exit_status = 15
    remedy = "Have the script run to its end, the same way each time, with a Checkpointer; then drill again."


class Preempted(Exception):
    """Training was asked to stop and stands at a step boundary; ``step`` says which, ``saved`` which step is durable.

    Not part of the tree: a loop that goes on after a failed save must not go on after this.
    """

    def __init__(self, step: int, saved: int | None, reason: str) -> None:
        self.step = step
        self.saved = saved
        super().__init__(reason)
