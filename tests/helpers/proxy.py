"""A bad network in front of a good server: an HTTP proxy that fails the requests it is told to, in the way it is told to."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}

# What may become of a request. Before the server has heard of it:
DROP = "drop"  # the connection is closed
STALL = "stall"  # nothing happens until the client gives up, or the proxy is given another ``fault``
SPOIL = "spoil"  # a byte of the body is another one
# After the server has done what it was asked for:
LOST = "lost"  # the connection is closed in place of an answer
RESET = "reset"  # the same, and hard
CUT = "cut"  # half of the body comes, then the connection is closed
SHORT = "short"  # half of the body comes, and is said to be all
LATE = "late"  # it goes well, a little later
TRICKLE = "trickle"  # a byte of the body comes now and then, and never the last one
FLIP = "flip"  # a byte of the body that comes is another one
BUSY = (429, b"", (("Retry-After", "1"),))  # asks for more time than the client's patience would take
ALL = (DROP, LOST, RESET, CUT, SHORT, LATE, 503, 500, 429, BUSY)
LATE_S = 0.05


@dataclass(frozen=True)
class Asked:
    """A request as the proxy sees it. ``number`` counts all of them, from 0."""

    number: int
    method: str
    path: str
    length: int
    headers: dict[str, str]


Fault = str | int | tuple[int, bytes] | tuple[int, bytes, tuple[tuple[str, str], ...]] | None
"""One of the words above; a status; a status and a body, and headers; None for a request that goes well."""


@dataclass
class Proxy:
    """``fault`` decides about each request. ``asked`` and ``done`` tell what came, and what became of it."""

    endpoint: str
    fault: Callable[[Asked], Fault] = field(default=lambda asked: None)
    asked: list[Asked] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)

    def meet(self, method: str, path: str, length: int, headers: dict[str, str]) -> Fault:
        with self.lock:
            asked = Asked(len(self.asked), method, path, length, headers)
            self.asked.append(asked)
            fault = self.fault(asked)
            self.done[str(fault[0] if isinstance(fault, tuple) else fault or "well")] += 1
            return fault


def at_random(rate: float, seed: int, kinds: tuple[Fault, ...] = ALL) -> Callable[[Asked], Fault]:
    """Fails so many of the requests, each in some way."""
    print(f"faults: {rate:.0%} of requests, seed {seed}")
    dice = random.Random(seed)
    return lambda asked: dice.choice(kinds) if dice.random() < rate else None


def one_flipped(data: bytes) -> bytes:
    """Another byte in the middle."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@contextlib.contextmanager
def proxy_before(address: tuple[str, int]) -> Iterator[Proxy]:
    """A proxy in front of the server at this address."""
    proxy = Proxy("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body are two segments: the second would wait for an acknowledgement that is put off.
        disable_nagle_algorithm = True

        def log_message(self, *_args):
            pass

        def work(self):
            length = int(self.headers.get("Content-Length") or 0)
            rule = proxy.fault
            fault = proxy.meet(self.command, self.path, length, dict(self.headers))
            if fault == DROP:
                hang_up(self)
                return
            try:
                body = self.rfile.read(length)
            except OSError:
                hang_up(self)
                return
            if fault == STALL:
                self.connection.settimeout(0.05)
                while not proxy.over.is_set() and proxy.fault is rule:
                    with contextlib.suppress(TimeoutError):
                        if not self.connection.recv(1):
                            break
                hang_up(self)
                return
            if isinstance(fault, int | tuple):
                status, said, *more = fault if isinstance(fault, tuple) else (fault, b"")
                answer(self, status, [("Content-Type", "application/xml"), *(more[0] if more else ())], said)
                return
            if fault == SPOIL and body:
                body = one_flipped(body)
            if fault == LATE:
                proxy.over.wait(LATE_S)
            status, headers, said = forward(self, body)
            if fault in (LOST, RESET):
                hang_up(self, hard=fault == RESET)
                return
            if fault in (CUT, SHORT) and said:
                half = said[: len(said) // 2]
                answer(self, status, headers, half, len(said) if fault == CUT else len(half))
                hang_up(self)
                return
            if fault == FLIP and said:
                said = one_flipped(said)
            if fault == TRICKLE and said:
                answer(self, status, headers, b"", len(said))
                with contextlib.suppress(OSError):
                    for at in range(len(said) - 1):
                        self.wfile.write(said[at : at + 1])
                        proxy.over.wait(LATE_S)
                hang_up(self)
                return
            answer(self, status, headers, said)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = work

    def forward(handler, body):
        to = http.client.HTTPConnection(*address, timeout=60)
        try:
            headers = {key: value for key, value in handler.headers.items() if key.lower() not in HOP}
            to.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for key, value in headers.items():
                to.putheader(key, value)
            to.endheaders(body)
            got = to.getresponse()
            length = got.headers.get("Content-Length", "0")
            said = b"" if handler.command == "HEAD" else got.read()
            kept = [(k, v) for k, v in got.getheaders() if k.lower() not in HOP | {"content-length", "date", "server"}]
            if handler.command == "HEAD":
                kept.append(("Content-Length", length))
            return got.status, kept, said
        finally:
            to.close()

    def answer(handler, status, headers, said, length=None):
        handler.send_response(status)
        for key, value in headers:
            handler.send_header(key, value)
        if handler.command != "HEAD":
            handler.send_header("Content-Length", str(len(said) if length is None else length))
        with contextlib.suppress(OSError):
            handler.end_headers()
            if handler.command != "HEAD":
                handler.wfile.write(said)

    def hang_up(handler, *, hard=False):
        handler.close_connection = True
        with contextlib.suppress(OSError):
            if hard:
                handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                handler.connection.close()
            else:
                handler.connection.shutdown(socket.SHUT_RDWR)

    class Serving(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request, client_address):
            # A client that has hung up is what half of the tests want.
            pass

    server = Serving(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    proxy.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield proxy
    finally:
        proxy.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
