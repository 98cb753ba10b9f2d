"""Hosts for tests: network namespaces of this machine with a cable between them, which share its file systems."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import platform
import shutil
import signal
import socket
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

from keepstep.agent.node import runtime_folder
from tests.helpers.agents import is_alive, wait_until

CABLE = "eth0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29500
_NEW_NETWORK, _NEW_NAMES = 0x40000000, 0x04000000
_made = itertools.count()


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20).stdout


class Hosts:
    """Two hosts, ``names``. Skips the test where the machine does not allow them; use it as a context manager."""

    def __init__(self) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("hosts of a test are network namespaces: they need root and the ip command")
        mark = f"ks{os.getpid():x}-{next(_made)}"
        self.names = (f"{mark}a", f"{mark}b")

    def __enter__(self) -> Hosts:
        try:
            for name in self.names:
                ip("netns", "add", name)
            first, second = self.names
            ip("link", "add", CABLE, "netns", first, "type", "veth", "peer", "name", CABLE, "netns", second)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", CABLE, "up")
        except subprocess.CalledProcessError as err:
            self.__exit__()
            pytest.skip(f"this machine allows no network namespaces: {err.stderr.strip()}")
        return self

    def __exit__(self, *_: object) -> None:
        """Ends whatever runs on the hosts, and removes them and what they left behind."""
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                pids = [int(pid) for pid in ip("netns", "pids", name).split()]
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                wait_until(lambda pids=pids: not any(map(is_alive, pids)), what="the end of what ran on a host")
            place = Path("/var/run/netns", name)
            if place.exists():
                for left in runtime_folder().glob(f"{place.stat().st_ino:x}[-.]*"):
                    left.unlink()
                ip("netns", "delete", name)


def join(name: str) -> None:
    """This process is on that host from now on, and so is what it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/var/run/netns", name).open() as place:
        if libc.setns(place.fileno(), _NEW_NETWORK) or libc.unshare(_NEW_NAMES):
            raise OSError(ctypes.get_errno(), f"cannot join host {name}")
    socket.sethostname(name)
    platform._uname_cache = None


def on_hosts(rank, names, fn, *args):
    """``fn(rank, *args)`` as a launcher on these hosts would run it: the first ranks on the first, the rest on the second.

    For a Job: leaves the group it was started with, for one over the cable.
    """
    import torch.distributed as dist

    world = dist.get_world_size()
    dist.destroy_process_group()
    join(names[rank * len(names) // world])
    os.environ |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": CABLE}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        return fn(rank, *args)
    finally:
        # The first rank has the store: it leaves last.
        dist.barrier()
        dist.destroy_process_group()


def cut() -> None:
    """Pulls the cable out of this host."""
    ip("link", "set", CABLE, "down")


def mend() -> None:
    ip("link", "set", CABLE, "up")


def connections(pid: int, state: str) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """The TCP sockets of a process in a state (``01`` established, ``0A`` listening): its own address, and the other's."""
    own = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(str(descriptor.readlink()))
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == state and f"socket:[{fields[9]}]" in own:
            found.append((_address(fields[1]), _address(fields[2])))
    return found


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.partition(":")
    return socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)
