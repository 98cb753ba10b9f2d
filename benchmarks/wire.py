"""A store that speaks S3 and costs nothing of its own: what is measured is the client and the wire.

Objects lie in the memory of this process. Nothing is hashed and no signature is looked at, because a server that does (as
rclone's does, at about 150 MiB/s) is what is measured then. Conditions (`If-None-Match`, `If-Match`) are kept.

`--first-byte-ms` and `--connection-mib-s` make it as far away as a real one is: what a store in the same region takes until
it answers, and what one connection to it carries. There is no other delay, and no limit for all connections together, but
what this machine can do.

    python benchmarks/wire.py 9000 [--first-byte-ms 20] [--connection-mib-s 90]

It counts: `GET /_counts` tells requests and bytes by method.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import secrets
import socket
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PIECE_BYTES = 1 << 18
WHEN = "Mon, 02 Jan 2006 15:04:05 GMT"
WHEN_LISTED = "2006-01-02T15:04:05.000Z"


@dataclass
class Stored:
    """An object: its parts, one after another."""

    parts: list[memoryview]
    tag: str = field(default_factory=lambda: f'"{secrets.token_hex(16)}"')

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    def cut(self, start: int, stop: int) -> list[memoryview]:
        """Bytes [start, stop)."""
        found, at = [], 0
        for part in self.parts:
            low, high = max(start - at, 0), min(stop - at, len(part))
            if low < high:
                found.append(part[low:high])
            at += len(part)
        return found


@dataclass
class Store:
    """Everything that is there. Memory of what was removed is used again: fresh memory has a price."""

    first_byte_s: float = 0.0
    connection_bytes_s: float = 0.0
    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, dict[int, memoryview]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    spare: defaultdict[int, list[memoryview]] = field(default_factory=lambda: defaultdict(list))
    lock: threading.RLock = field(default_factory=threading.RLock)

    def memory(self, size: int) -> memoryview:
        with self.lock:
            return self.spare[size].pop() if self.spare[size] else memoryview(bytearray(size))

    def give_back(self, parts: list[memoryview]) -> None:
        with self.lock:
            for part in parts:
                if len(part) >= PIECE_BYTES:
                    self.spare[len(part)].append(part)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    store: Store
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 0
    rbufsize = 1 << 16

    def log_message(self, *_args: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    # ------------------------------------------------------------------------------- requests

    def do_PUT(self) -> None:
        key, query = self._asked()
        body = self._body()
        with self.store.lock:
            if "uploadId" in query:
                parts = self.store.uploads.get(query["uploadId"])
                if parts is None:
                    self._refuse(404, "NoSuchUpload")
                    return
                parts[int(query["partNumber"])] = body
                self._answer(200, ETag=f'"{secrets.token_hex(16)}"')
                return
            if "/" not in key:
                self._answer(200)
                return
            if source := self.headers.get("x-amz-copy-source"):
                self._copy(key, unquote(source).lstrip("/"))
                return
            there = self.store.objects.get(key)
            if self.headers.get("If-None-Match") == "*" and there is not None:
                self._refuse(412, "PreconditionFailed")
                return
            wanted = self.headers.get("If-Match")
            if wanted and (there is None or there.tag != wanted):
                self._refuse(412, "PreconditionFailed")
                return
            self.store.objects[key] = stored = Stored([body])
        self._answer(200, ETag=stored.tag)

    def do_POST(self) -> None:
        key, query = self._asked()
        body = bytes(self._body())
        with self.store.lock:
            if "uploads" in query:
                upload = secrets.token_hex(16)
                self.store.uploads[upload] = {}
                bucket, _, name = key.partition("/")
                said = f"<Bucket>{bucket}</Bucket><Key>{escape(name)}</Key><UploadId>{upload}</UploadId>"
                self._say("InitiateMultipartUploadResult", said)
            elif "uploadId" in query:
                parts = self.store.uploads.pop(query["uploadId"], None)
                if parts is None:
                    self._refuse(404, "NoSuchUpload")
                    return
                numbers = map(int, re.findall(rb"<PartNumber>(\d+)<", body))
                self.store.objects[key] = stored = Stored([parts[number] for number in numbers])
                self._say("CompleteMultipartUploadResult", f"<ETag>{escape(stored.tag)}</ETag>")
            elif "delete" in query:
                names = [unquote_xml(each) for each in re.findall(r"<Key>(.*?)</Key>", body.decode())]
                for name in names:
                    self._drop(f"{key.rstrip('/')}/{name}")
                self._say("DeleteResult", "".join(f"<Deleted><Key>{escape(n)}</Key></Deleted>" for n in names))
            else:
                self._refuse(400, "InvalidRequest")

    def do_DELETE(self) -> None:
        key, query = self._asked()
        with self.store.lock:
            if "uploadId" in query:
                self.store.give_back([*self.store.uploads.pop(query["uploadId"], {}).values()])
            else:
                self._drop(key)
        self._answer(204)

    def do_GET(self) -> None:
        key, query = self._asked()
        if key == "_counts":
            self._answer(200, json.dumps(self.store.counts).encode())
            return
        if "/" not in key.rstrip("/"):
            self._list(key.rstrip("/"), query)
            return
        with self.store.lock:
            found = self.store.objects.get(key)
        if found is None:
            self._refuse(404, "NoSuchKey")
            return
        if self.headers.get("If-Match", found.tag) != found.tag:
            self._refuse(412, "PreconditionFailed")
            return
        size = found.size
        about = {"ETag": found.tag, "Last-Modified": WHEN, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, stop = (int(asked[1]), min(int(asked[2] or size) + 1, size)) if asked else (0, size)
        if asked and start >= size:
            self._refuse(416, "InvalidRange")
            return
        if asked:
            about["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self._begin(206 if asked else 200, stop - start, about)
        if self.command != "HEAD":
            self._send(found.cut(start, stop))

    do_HEAD = do_GET

    # -------------------------------------------------------------------------------- answers

    def _asked(self) -> tuple[str, dict[str, str]]:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        with self.store.lock:
            self.store.counts[self.command] += url.path != "/_counts"
        if self.store.first_byte_s:
            time.sleep(self.store.first_byte_s)
        return unquote(url.path)[1:], query

    def _body(self) -> memoryview:
        """All of a body, which may come in signed chunks."""
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        chunked = "aws-chunked" in self.headers.get("Content-Encoding", "")
        framed = self.headers.get("Transfer-Encoding", "") == "chunked"
        length = int(self.headers.get("X-Amz-Decoded-Content-Length" if chunked else "Content-Length") or 0)
        if framed and not chunked:
            message = "a body of unknown length"
            raise ConnectionError(message)
        body = self.store.memory(length)
        outer = _Unframed(self.rfile) if framed else self.rfile
        inner = _Unframed(outer) if chunked else outer
        self._receive(inner, body)
        if chunked:
            inner.finish()
        if framed:
            outer.finish()
        with self.store.lock:
            self.store.counts[f"{self.command} bytes"] += length
        return body

    def _receive(self, source, body: memoryview) -> None:
        began, done = time.perf_counter(), 0
        piece = PIECE_BYTES if self.store.connection_bytes_s else max(1, len(body))
        while done < len(body):
            got = source.readinto(body[done : done + piece])
            if not got:
                message = "the body ends early"
                raise ConnectionError(message)
            done += got
            self._pace(began, done)

    def _send(self, parts: list[memoryview]) -> None:
        began, done = time.perf_counter(), 0
        for part in parts:
            piece = PIECE_BYTES if self.store.connection_bytes_s else max(1, len(part))
            for start in range(0, len(part), piece):
                self.connection.sendall(part[start : start + piece])
                done += min(piece, len(part) - start)
                self._pace(began, done)
        with self.store.lock:
            self.store.counts["GET bytes"] += done

    def _pace(self, began: float, done: int) -> None:
        if self.store.connection_bytes_s:
            early = done / self.store.connection_bytes_s - (time.perf_counter() - began)
            if early > 0.001:
                time.sleep(early)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter = f"{bucket}/{query.get('prefix', '')}", query.get("delimiter", "")
        with self.store.lock:
            found = sorted((key, each.size) for key, each in self.store.objects.items() if key.startswith(prefix))
        said, folders = [], set()
        for key, size in found:
            head, mark, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if mark:
                folders.add(prefix[len(bucket) + 1 :] + head + mark)
                continue
            name = escape(key[len(bucket) + 1 :])
            said.append(
                f"<Contents><Key>{name}</Key><Size>{size}</Size><LastModified>{WHEN_LISTED}</LastModified>"
                '<ETag>"0"</ETag><StorageClass>STANDARD</StorageClass></Contents>'
            )
        said += [f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in sorted(folders)]
        head = (
            f"<Name>{bucket}</Name><Prefix>{escape(query.get('prefix', ''))}</Prefix><KeyCount>{len(said)}</KeyCount>"
        )
        self._say(
            "ListBucketResult", f"{head}<MaxKeys>1000000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(said)}"
        )

    def _copy(self, key: str, source: str) -> None:
        found = self.store.objects.get(source)
        if found is None:
            self._refuse(404, "NoSuchKey")
            return
        # (The copy has memory of its own: what is dropped may be written over.)
        self.store.objects[key] = stored = Stored([memoryview(bytearray(part)) for part in found.parts])
        self._say("CopyObjectResult", f"<ETag>{escape(stored.tag)}</ETag><LastModified>{WHEN_LISTED}</LastModified>")

    def _drop(self, key: str) -> None:
        gone = self.store.objects.pop(key, None)
        if gone is not None:
            self.store.give_back(gone.parts)

    def _say(self, name: str, inside: str) -> None:
        space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
        text = f'<?xml version="1.0" encoding="UTF-8"?><{name} {space}>{inside}</{name}>'
        self._answer(200, text.encode(), **{"Content-Type": "application/xml"})

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"" if self.command == "HEAD" else f"<Error><Code>{code}</Code></Error>".encode())

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self._begin(status, len(body), headers)
        if body:
            self.connection.sendall(body)

    def _begin(self, status: int, length: int, headers: dict[str, str]) -> None:
        lines = [f"HTTP/1.1 {status} OK", "Server: wire", "x-amz-request-id: 0"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if status != 204:
            lines.append(f"Content-Length: {length}")
        self.connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())


class _Unframed:
    """A body without the frames of its chunks. One within another has two kinds of them."""

    def __init__(self, source) -> None:
        self.source = source
        self.left = 0
        self.over = False

    def readinto(self, buffer) -> int:
        if not self.left and not self.over:
            self._next()
        got = self.source.readinto(memoryview(buffer)[: self.left]) if self.left else 0
        self.left -= got
        if got and not self.left:
            self.source.readline()
        return got

    def readline(self) -> bytes:
        """A line of what is framed."""
        said = bytearray()
        one = bytearray(1)
        while self.readinto(one):
            said += one
            if one == b"\n":
                break
        return bytes(said)

    def finish(self) -> None:
        """Reads past the last chunk and what trails it."""
        while not self.over:
            if self.left:
                self.readinto(bytearray(self.left))
            else:
                self._next()

    def _next(self) -> None:
        self.left = int(self.source.readline().split(b";")[0].strip() or b"0", 16)
        if not self.left:
            self.over = True
            while self.source.readline().strip():
                pass


def unquote_xml(text: str) -> str:
    """Text of an XML document as it was."""
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")


class Serving(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        super().server_bind()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--first-byte-ms", type=float, default=0.0)
    parser.add_argument("--connection-mib-s", type=float, default=0.0)
    args = parser.parse_args()
    Handler.store = Store(args.first_byte_ms / 1e3, args.connection_mib_s * (1 << 20))
    Serving(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
