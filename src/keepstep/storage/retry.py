"""Trying again: what passes by itself is tried a few times, further and further apart; what does not is said at once."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from keepstep.errors import StorageError

__all__ = ["Patience", "Trouble", "patiently"]

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a remote storage is waited for.

    ``tries`` of one operation at most, none of them begun later than ``total_s`` after the first; between them a random wait
    of up to ``first_wait_s``, which doubles each time up to ``longest_wait_s``. ``request_s`` is the longest that one
    request may take, its body included.
    """

    tries: int = 8
    first_wait_s: float = 0.2
    longest_wait_s: float = 10.0
    request_s: float = 60.0
    total_s: float = 180.0


@dataclass(frozen=True, slots=True)
class Trouble:
    """What an error of a client library means. ``passing`` when another try may succeed."""

    errno: int
    text: str
    passing: bool = False


def patiently(
    act: Callable[[], _Answer],
    explain: Callable[[Exception], Trouble],
    *,
    what: tuple[str, str],
    errors: tuple[type[Exception], ...],
    patience: Patience,
) -> _Answer:
    """What ``act`` returns, tried again while it fails for a reason that passes. Any thread.

    Args:
        act: one try; done twice it is as good as done once.
        explain: says what an error means.
        what: the operation and the name, for the message.
        errors: what ``act`` may raise when a try fails; everything else is raised as it is.
        patience: how often, and for how long.

    Raises:
        StorageError: the last try's trouble.
    """
    began = time.monotonic()
    limit_s = patience.first_wait_s
    for left in reversed(range(max(1, patience.tries))):
        try:
            return act()
        except StorageError:
            raise
        except errors as err:
            trouble = explain(err)
            spent_s = time.monotonic() - began
            if not trouble.passing or not left or spent_s >= patience.total_s:
                tried = patience.tries - left
                often = f" (tried {tried} times in {spent_s:.1f} s)" if tried > 1 else ""
                raise StorageError(*what, OSError(trouble.errno, trouble.text + often)) from err
            # Full jitter: many ranks that were refused at once do not come back at once. Not from the random numbers of
            # the training.
            time.sleep(limit_s * secrets.randbelow(1 << 20) / (1 << 20))
            limit_s = min(2 * limit_s, patience.longest_wait_s)
    raise AssertionError  # the last try returns or raises
