"""Ranged reads by signed URLs, for servers that send a range under the status of a whole object.

The standard forbids it, and obstore refuses such an answer; several servers give it all the same. The range that was sent
is in the answer, so it can be told.
"""

from __future__ import annotations

import contextlib
import errno
import re
import ssl
import weakref
from collections import deque
from collections.abc import Callable
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from keepstep.storage.client import Opened, check_full

__all__ = ["RefusedError", "SignedReader"]

_CODE = re.compile(rb"<Code>\s*(\w+)\s*</Code>")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class RefusedError(OSError):
    """The store answered with an error: its HTTP status and its own code."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(errno.EIO, f"status code: {status} {code}")
        self.status = status
        self.code = code


class SignedReader:
    """Reads ranges of objects. Any thread; connections are kept for the next one that reads.

    Args:
        sign: makes a URL that may be read for a while, from a name.
        request_s: how long one answer may be waited for.
    """

    def __init__(self, sign: Callable[[str], str], request_s: float) -> None:
        self._sign = sign
        self._request_s = request_s
        self._idle: deque[tuple[str, HTTPConnection]] = deque()
        weakref.finalize(self, _hang_up, self._idle)

    def open(self, name: str, first_bytes: int) -> Opened:
        """Size and beginning of an object; see Client."""
        first = bytearray(first_bytes)
        try:
            size, got, version = self._read(name, 0, memoryview(first), version="")
        except RefusedError as err:
            if err.status == 416:
                return Opened(0, b"")
            if err.status == 404 and err.code != "NoSuchBucket":
                raise FileNotFoundError(errno.ENOENT, "there is no such object") from err
            raise
        check_full(got, min(size, first_bytes))
        return Opened(size, bytes(first[:got]), version)

    def read_into(self, name: str, opened: Opened, offset: int, buffer: memoryview) -> None:
        """Fills the buffer; see Client."""
        _, got, _ = self._read(name, offset, buffer, version=opened.version)
        check_full(got, len(buffer))

    def _read(self, name: str, offset: int, buffer: memoryview, *, version: str) -> tuple[int, int, str]:
        """Reads as much of the range as there is. Returns the object's size, the bytes read, and its version."""
        url = urlsplit(self._sign(name))
        headers = {"Range": f"bytes={offset}-{offset + len(buffer) - 1}"} | ({"If-Match": version} if version else {})
        host = f"{url.scheme}://{url.netloc}"
        connection = self._connection(host)
        done = 0
        try:
            connection.request("GET", f"{url.path}?{url.query}", headers=headers)
            answer = connection.getresponse()
            size, length = _told(answer, offset)
            while done < min(length, len(buffer)) and (got := answer.readinto(buffer[done:length])):
                done += got
            check_full(done, length)
            # (So that the connection knows that this answer is over.)
            answer.read()
        except BaseException:
            # What is left of this answer would be taken for the next one.
            connection.close()
            raise
        self._idle.append((host, connection))
        return size, done, answer.headers.get("ETag", "")

    def _connection(self, host: str) -> HTTPConnection:
        with contextlib.suppress(IndexError):
            kept, connection = self._idle.pop()
            if kept == host:
                return connection
            connection.close()
        scheme, _, name = host.partition("://")
        if scheme == "https":
            return HTTPSConnection(name, timeout=self._request_s, context=ssl.create_default_context())
        return HTTPConnection(name, timeout=self._request_s)


def _hang_up(connections: deque[tuple[str, HTTPConnection]]) -> None:
    for _, connection in connections:
        connection.close()


def _told(answer: HTTPResponse, offset: int) -> tuple[int, int]:
    """The object's size and how many bytes follow.

    Raises:
        RefusedError: an error.
        ConnectionError: another range than the one that was asked for.
    """
    if answer.status not in (200, 206):
        found = _CODE.search(answer.read(1 << 16))
        raise RefusedError(answer.status, found[1].decode() if found else "")
    told = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if told is None:
        size = int(answer.headers.get("Content-Length", -1))
        if offset or size < 0:
            raise ConnectionError(errno.EIO, "the store does not say which bytes it sends")
        return size, size
    start, last, size = map(int, told.groups())
    if start != offset:
        raise ConnectionError(errno.EIO, f"the store sent bytes from {start:,} on, {offset:,} were asked for")
    return size, last + 1 - start
