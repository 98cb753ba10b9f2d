"""An error as a record: what it takes to raise it again in another process, on another rank, without pickle."""

from __future__ import annotations

import msgspec

from keepstep import errors
from keepstep.errors import (
    CheckpointError,
    CommitTimeoutError,
    MismatchError,
    RankFailedError,
    StagingError,
    StorageError,
    UnsafeValueError,
)

__all__ = ["Failure", "failure_in", "failure_of", "failure_on"]

_CLASSES = {
    cls.code: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, CheckpointError)
}


class Failure(msgspec.Struct, frozen=True):
    """An error of the tree by its code; the rest as far as its kind has it."""

    code: str
    text: str
    failures: dict[int, str] = {}
    codes: dict[int, str] = {}
    missing: tuple[int, ...] = ()
    mismatches: tuple[str, ...] = ()
    operation: str = ""
    key: str = ""
    errno: int = 0

    def error(self) -> CheckpointError:
        """The error itself, to be raised."""
        if self.code == RankFailedError.code:
            return RankFailedError(self.text, self.failures, self.codes)
        if self.code == CommitTimeoutError.code:
            return CommitTimeoutError(self.text, self.missing)
        if self.code == StorageError.code:
            made: CheckpointError = StorageError(self.operation, self.key, OSError(self.errno, ""))
            made.args = (self.errno, self.text)
            return made
        kind = _CLASSES.get(self.code, CheckpointError)
        if issubclass(kind, UnsafeValueError):
            return RankFailedError(self.text, {}, {})
        made = kind(self.text)
        if isinstance(made, MismatchError):
            made.mismatches = self.mismatches
        return made


def failure_of(error: BaseException) -> Failure:
    """The record of an error; one that is not of the tree keeps its type in the text."""
    if isinstance(error, RankFailedError):
        return Failure(error.code, error.what, error.failures, error.codes)
    if isinstance(error, CommitTimeoutError):
        return Failure(error.code, str(error), missing=error.missing)
    if isinstance(error, MismatchError):
        return Failure(error.code, str(error), mismatches=error.mismatches)
    if isinstance(error, StorageError):
        return Failure(error.code, str(error), operation=error.operation, key=error.key, errno=error.errno or 0)
    if isinstance(error, CheckpointError):
        return Failure(error.code, str(error))
    return Failure(CheckpointError.code, f"{type(error).__name__}: {error}")


def failure_in(call: str, error: BaseException) -> Failure:
    """How the coordinator's error in a call is told to the others: as itself where it speaks of all ranks."""
    failure = failure_of(error)
    of_one_rank = isinstance(error, StorageError | StagingError | UnsafeValueError)
    if isinstance(error, CheckpointError) and not of_one_rank:
        return failure
    code = error.code if isinstance(error, CheckpointError) else ""
    text = f"{type(error).__name__}: {error}"
    return Failure(RankFailedError.code, f"{call} failed", {0: text}, {0: code})


def failure_on(what: str, failures: dict[int, Failure], world: int) -> Failure:
    """What all ranks hear when some failed: of one rank alone its own error, else who said what."""
    if world == 1:
        return next(iter(failures.values()))
    texts = {rank: f"{_name(failure.code)}: {failure.text}" for rank, failure in failures.items()}
    return Failure(RankFailedError.code, what, texts, {rank: failure.code for rank, failure in failures.items()})


def _name(code: str) -> str:
    return _CLASSES.get(code, CheckpointError).__name__
