"""What a remote storage asks of a client library: single requests, without any patience of their own."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from keepstep.storage.retry import Trouble

__all__ = ["Client", "Opened", "check_full", "known_trouble"]


@dataclass(frozen=True, slots=True)
class Opened:
    """An object as one request has found it: its size, its first bytes, and what tells this version of it from others.

    ``generation`` does so as well, in stores that count them.
    """

    size_bytes: int
    first: bytes
    version: str = ""
    generation: str = ""


class Client(ABC):
    """One place in one store, through one library. Every method may be called from any thread.

    Methods raise what the library raises, which is one of ``errors``; ``explain`` says what it means. Names are relative
    to the place, and checked already. ``exclusive`` says whether ``write`` with ``new`` never replaces anything; None where
    that has to be tried out. ``resends`` is for libraries that send a request once more without saying so, ``private``
    for places that no other process sees, ``one_by_one`` for libraries that remove many objects by as many requests.
    """

    library: str
    errors: tuple[type[Exception], ...]
    exclusive: bool | None = None
    resends: bool = False
    private: bool = False
    one_by_one: bool = False

    @abstractmethod
    def check_process(self) -> None:
        """Refuses to work in a process where the library cannot.

        Raises:
            UsageError: says which one, and what to do.
        """

    @abstractmethod
    def write(self, name: str, data: bytes | memoryview, *, new: bool = False) -> None:
        """One object, in one request. With ``new`` a FileExistsError when the name is taken."""

    @abstractmethod
    def write_over(self, name: str, data: bytes, opened: Opened) -> None:
        """One object in place of one version of it, in one request. A FileExistsError when another one is there by now.

        Raises:
            NotImplementedError: the store, or the library, has no such condition.
        """

    @abstractmethod
    def stream(self, name: str, parts: Iterator[memoryview], part_bytes: int) -> None:
        """One object from parts of ``part_bytes``, the last one shorter; a part is the library's until this returns.

        The object is there at the end; it is not there at all when ``parts`` raises, and that is raised again.
        """

    @abstractmethod
    def open(self, name: str, first_bytes: int) -> Opened:
        """Size and beginning of an object. FileNotFoundError when it is absent."""

    @abstractmethod
    def read_into(self, name: str, opened: Opened, offset: int, buffer: memoryview) -> None:
        """Fills the buffer from that version of the object; an error when fewer bytes come."""

    @abstractmethod
    def list(self, folder: str) -> Sequence[tuple[str, int]]:
        """Names and sizes of everything below a folder ("" for all)."""

    @abstractmethod
    def folders(self) -> Sequence[str]:
        """The first segments of names that have more than one."""

    @abstractmethod
    def written_at(self, folder: str) -> Mapping[str, float]:
        """When each of them was written, in seconds since 1970; without those of which that is not told."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Removes objects; absent ones are no error."""

    @abstractmethod
    def explain(self, error: Exception) -> Trouble:
        """What one of ``errors`` means."""


_DENIED = "access was denied: these credentials may not do this here"
_KEYS = "the store does not know these credentials: key or secret is wrong, or was withdrawn"
_EXPIRED = "the credentials have expired: renew them, or let the machine's role give them"
_REGION = "the bucket is in another region, or behind another endpoint, than the one that was asked"
_CLOCK = "the clock of this machine differs too much from that of the store: set it"
_LIMITED = "the object is larger than the store takes in one request"
_CODES = MappingProxyType(
    {
        "NoSuchBucket": (errno.ENODEV, "the bucket does not exist"),
        "ContainerNotFound": (errno.ENODEV, "the container does not exist"),
        "AccessDenied": (errno.EACCES, _DENIED),
        "AllAccessDisabled": (errno.EACCES, _DENIED),
        "AuthorizationFailure": (errno.EACCES, _DENIED),
        "AuthorizationPermissionMismatch": (errno.EACCES, _DENIED),
        "InvalidAccessKeyId": (errno.EACCES, _KEYS),
        "SignatureDoesNotMatch": (errno.EACCES, _KEYS),
        "AuthenticationFailed": (errno.EACCES, _KEYS),
        "InvalidToken": (errno.EACCES, _KEYS),
        "ExpiredToken": (errno.EACCES, _EXPIRED),
        "TokenRefreshRequired": (errno.EACCES, _EXPIRED),
        "RequestExpired": (errno.EACCES, _EXPIRED),
        "RequestTimeTooSkewed": (errno.EACCES, _CLOCK),
        "PermanentRedirect": (errno.EINVAL, _REGION),
        "TemporaryRedirect": (errno.EINVAL, _REGION),
        "AuthorizationHeaderMalformed": (errno.EINVAL, _REGION),
        "IllegalLocationConstraintException": (errno.EINVAL, _REGION),
        "EntityTooLarge": (errno.EFBIG, _LIMITED),
        "QuotaExceeded": (errno.EDQUOT, "the store's quota is used up"),
    }
)
_STATUSES = MappingProxyType(
    {
        301: (errno.EINVAL, _REGION),
        307: (errno.EINVAL, _REGION),
        401: (errno.EACCES, _KEYS),
        403: (errno.EACCES, _DENIED),
        404: (errno.ENOENT, "there is no such object"),
        413: (errno.EFBIG, _LIMITED),
        507: (errno.ENOSPC, "the store is full"),
    }
)
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_PASSING_CODES = frozenset({"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "ServerBusy"})
_SPOILT_CODES = frozenset({"XAmzContentSHA256Mismatch", "BadDigest", "Md5Mismatch", "Crc64Mismatch"})


def known_trouble(code: str, status: int, *, renews: bool = False) -> Trouble | None:
    """What a store means by an error code and an HTTP status (0: none came); None when neither is known.

    With ``renews`` the next try may have other credentials.
    """
    if code in _CODES:
        number, text = _CODES[code]
        return Trouble(number, text, passing=renews and text == _EXPIRED)
    if code in _SPOILT_CODES:
        return Trouble(errno.EIO, f"the store got other bytes than were sent ({status} {code})", passing=True)
    if status in _PASSING or code in _PASSING_CODES:
        said = f"{status} {code}".strip()
        return Trouble(errno.EAGAIN if status in (429, 503) else errno.EIO, f"the store answered {said}", passing=True)
    if status in _STATUSES:
        number, text = _STATUSES[status]
        return Trouble(number, f"{text} ({f'{status} {code}'.strip()})")
    return None


def check_full(got: int, wanted: int) -> None:
    """Refuses a body that is shorter, or longer, than what was asked for.

    Raises:
        ConnectionError: it is.
    """
    if got != wanted:
        raise ConnectionError(errno.EIO, f"the store sent {got:,} bytes where {wanted:,} were asked for")
