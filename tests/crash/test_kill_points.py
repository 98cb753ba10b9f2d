"""Killed at every named point of restore, save, commit and retention: on one rank, two and four, in each way to save."""

from __future__ import annotations

import pytest

from tests.crash.campaign import Campaign, quick_folder
from tests.crash.test_kill import warm
from tests.helpers.jobs import alone

STEPS = 3


def killed_at_every_point(folder, world, background, victim):
    """One job after the other in one folder, each of which dies at the next point."""
    warm(folder)
    campaign = Campaign(folder / "campaign", world, background)
    campaign.counts(STEPS, victim)
    points = campaign.counts(STEPS, victim)
    for point, count in points.items():
        # The first times are as good as all: the first save after a restore, and the first with something to remove.
        for nth in range(1, min(count, 2) + 1):
            ends = [campaign.start(STEPS, (victim, point, nth)).wait_for(victim)]
            campaign.died(ends, 0)
            campaign.check()
    return campaign.kills, dict(points), campaign.last


@pytest.mark.case(72)
@pytest.mark.case(79)
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("world", "background", "victim"),
    [
        (1, "off", 0),
        (1, "thread", 0),
        (2, "off", 0),
        (2, "thread", 1),
        (4, "off", 3),
        (4, "thread", 0),
    ],
)
def test_killed_at_every_point(rank_pool, world, background, victim):
    with quick_folder() as folder:
        arguments = (folder, world, background, victim)
        ((kills, points, last),) = rank_pool(1)(alone, killed_at_every_point, *arguments, timeout_s=200)
    print(f"{kills} kills at {len(points)} points, up to step {last}: {points}")
    assert {"capture", "plan", "copy", "choose", "read", "agree", "finish"} - set(points) <= (
        {"choose"} if victim else set()
    )
    if victim == 0:
        assert {"receipts", "publish", "published", "latest", "tidy", "remove"} <= set(points)
        assert kills > 25
    assert last > STEPS
