"""What a running job has written so far, and the moment to kill it."""

from __future__ import annotations

import pytest

from keepstep.check.trace import Began, Saved, Stepped, TraceWriter
from keepstep.drill.plan import Moment
from keepstep.drill.watch import Seen, Tail, Trigger
from keepstep.errors import CorruptError

STEP_S, SAVE_S = 0.1, 0.4


def began(rank: int = 0, step: int = 0, world: int = 1) -> Began:
    return Began(rank=rank, world=world, incarnation=1, step=step, restored=step > 0)


def test_only_what_is_written_from_now_on_is_seen_and_only_whole_lines(tmp_path):
    with TraceWriter(tmp_path, 0) as writer:
        writer.write(began())
        writer.write(Stepped(step=5))
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(path.read_bytes() + b'{"what":"step')
    tail, seen = Tail(tmp_path), Seen()
    assert not tail.look(seen)
    assert (seen.begun, seen.begin, seen.step, seen.newest("due")) == (False, -1, -1, -1)
    with TraceWriter(tmp_path, 0) as writer, TraceWriter(tmp_path, 1) as other:
        writer.write(began(step=3, world=2))
        assert tail.look(seen)
        assert not seen.begun
        other.write(began(rank=1, step=3, world=2))
        other.write(Stepped(step=4))
        assert tail.look(seen)
        assert not tail.look(seen)
        assert (seen.begun, seen.begin, seen.step) == (True, 3, 4)
        with path.open("ab") as stream:
            stream.write(b'{"what":"ended"')
            stream.flush()
            assert not tail.look(seen)
            stream.write(b',"step":4,"why":"closed"}\n')
        assert tail.look(seen)
        with path.open("ab") as stream:
            stream.write(b'{"what":"nothing"}\n')
        with pytest.raises(CorruptError, match=r"rank-00000\.jsonl"):
            tail.look(seen)


def test_a_save_has_come_as_far_as_its_ranks_and_not_where_it_failed():
    seen = Seen()
    for rank in (0, 1):
        seen.add(rank, began(rank, world=2))
    seen.add(0, Saved(step=3, event="staged"))
    assert seen.newest("staged") == 3
    assert seen.newest("staged", all_ranks=True) == -1
    seen.add(1, Saved(step=3, event="staged"))
    seen.add(1, Saved(step=6, event="staged"))
    assert seen.newest("staged", all_ranks=True) == 3
    seen.add(1, Saved(step=3, event="failed"))
    assert seen.newest("staged", all_ranks=True) == -1


class Job:
    """Feeds a trigger with records at times of the test's own."""

    def __init__(self, kind, *, begin=0, first=False, dues=(4, 8), ahead=0.0, late=0.5) -> None:
        moment = Moment(kind, ahead, late, agent=False)
        self.trigger = Trigger(moment, last=12, left=1, dues=dues, pace=(STEP_S, SAVE_S), first=first)
        self.seen = Seen()
        self.begin = begin

    def at(self, now_s: float, *records) -> bool:
        for record in records:
            self.seen.add(0, record)
        return self.trigger.is_due(self.seen, now_s)


def test_after_a_step_means_some_time_after_it():
    job = Job("step")
    assert not job.at(0.0)
    assert not job.at(1.0, began())
    assert not job.at(2.0, Stepped(step=1))
    assert not job.at(2.0 + 0.4 * STEP_S, Stepped(step=2))
    assert job.at(2.0 + 0.6 * STEP_S)
    assert job.trigger.why == "after step 1"


def test_inside_a_save_means_some_time_after_it_was_due():
    job = Job("save", ahead=0.2)
    assert not job.at(0.0, began(), Stepped(step=4))
    assert not job.at(1.0, Saved(step=4, event="due"))
    assert not job.at(1.0 + 0.4 * SAVE_S, Saved(step=4, event="committed"))
    assert job.at(1.0 + 0.6 * SAVE_S)
    assert job.trigger.why == "inside the save of step 4"


def test_staged_means_at_once():
    job = Job("staged", ahead=0.2)
    assert not job.at(0.0, began(), Stepped(step=4), Saved(step=4, event="due"))
    assert job.at(1.0, Saved(step=4, event="staged"))
    assert job.trigger.why == "when the copy of step 4 was complete"


def test_a_save_that_does_not_come_is_not_waited_for_beyond_the_last_step_but_one():
    job = Job("staged", ahead=0.9)
    assert not job.at(0.0, began(), Stepped(step=10))
    assert job.at(1.0, Stepped(step=11))


def test_the_first_save_of_a_run_is_left_to_finish():
    job = Job("step", first=True, ahead=0.9)
    assert not job.at(0.0, began(), Stepped(step=10), Saved(step=4, event="due"))
    assert not job.at(5.0, Stepped(step=11))
    assert not job.at(9.0)
    assert job.at(9.1, Saved(step=4, event="committed"))
    assert job.trigger.why == "once the first step was committed"
    # Before it is about to begin, there is nothing to leave.
    early = Job("step", first=True)
    assert not early.at(0.0, began(), Stepped(step=1))
    assert early.at(1.0)
    about = Job("step", first=True, ahead=0.2)
    assert not about.at(0.0, began(), Stepped(step=3))
    assert not about.at(1.0)
