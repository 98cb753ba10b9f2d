"""What every test shares: one hypothesis profile, fixed seeds, and a pool of ranks kept for the session."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

import hypothesis
import pytest

from tests.helpers.ranks import RankPool
from tests.helpers.servers import (
    Server,
    azurite_server,
    fake_gcs_server,
    gcp_emulator,
    gcs_server,
    gcsfs_alone,
    moto_server,
    rclone_server,
    why_no_azurite,
)

pytest.register_assert_rewrite("keepstep.check.contract")

SEED = int(os.environ.get("KEEPSTEP_TEST_SEED", "0"))

hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_report_header() -> str:
    profile = os.environ.get("HYPOTHESIS_PROFILE", "ci")
    return f"seed: {SEED} (KEEPSTEP_TEST_SEED), hypothesis profile: {profile} (HYPOTHESIS_PROFILE)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "rank_pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """The same random numbers in every test, whatever ran before it. Import-free for tests without numpy and torch."""
    random.seed(SEED)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(SEED)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(SEED)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """``rank_pool(n)(fn, *args, timeout_s=60)``: results of ``fn(rank, *args)`` on n real ranks, kept warm."""
    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    """An S3 server with everything but speed; see tests/helpers/servers.py."""
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def moto_of_small_parts() -> Iterator[Server]:
    """The same, with parts of a page and more."""
    with moto_server(least_part_bytes=4096) as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An S3 server on a folder, which overlooks conditions."""
    with rclone_server(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def gcs() -> Iterator[Server]:
    """A server that speaks the part of Google's protocol that obstore uses."""
    with gcs_server() as server:
        yield server


@pytest.fixture(scope="session")
def fake_gcs() -> Iterator[Server]:
    """A server that speaks the part of Google's protocol that gcsfs uses."""
    with gcsfs_alone(), fake_gcs_server() as server:
        yield server


@pytest.fixture(scope="session")
def gcp() -> Iterator[Server]:
    """Another one, which overlooks conditions."""
    with gcsfs_alone(), gcp_emulator() as server:
        yield server


@pytest.fixture(scope="session")
def azurite() -> Iterator[Server]:
    """A server that speaks Azure's protocol. It comes by npm; where that was not there, its tests are skipped."""
    if missing := why_no_azurite():
        pytest.skip(missing)
    with azurite_server() as server:
        yield server


@pytest.fixture(autouse=True)
def _no_agents_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Agents of a test's runs end with the test; by themselves they would stay for a minute."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    if folder is not None:
        from tests.helpers.agents import stop_agents

        stop_agents(folder)
