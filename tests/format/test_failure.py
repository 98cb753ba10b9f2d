"""Every error of the tree, told to another process and raised there."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from keepstep import errors
from keepstep.errors import CheckpointError, RankFailedError, StorageError, UnsafeFileError, UnsafeValueError
from keepstep.format.failure import Failure, failure_in, failure_of

KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, CheckpointError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_raised_again_with_its_text(kind):
    told = msgspec.json.encode(Failure(kind.code, "what happened", operation="read", key="a", errno=5))
    error = msgspec.json.decode(told, type=Failure).error()
    assert "what happened" in str(error)
    # What the values were is not told; whose they were is.
    assert type(error) is (RankFailedError if issubclass(kind, UnsafeValueError) else kind)


@pytest.mark.parametrize(
    "error", [UnsafeValueError(["a: b"]), UnsafeFileError(["a: b"]), StorageError("read", "a", OSError(5, "no"))]
)
def test_what_speaks_of_one_rank_is_told_as_that_ranks(error):
    told = failure_in("load", error)
    assert (told.code, told.codes) == (RankFailedError.code, {0: error.code})
    assert str(error) in str(told.error())
    assert str(error) in str(failure_of(error).error())
