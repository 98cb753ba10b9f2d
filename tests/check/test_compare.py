"""Two traces beside each other: what is called equal, which difference is called the first, and what is said of it."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from keepstep.check.compare import compare
from keepstep.check.trace import Began, Run, Saved, Stepped, Trace

PARTS = ("model", "optimizer", "scheduler", "scaler", "data", "rng/python", "rng/torch")


def step(number: int, rank: int = 0, **changes) -> Stepped:
    """Step ``number`` as it should be: everything in it depends on the step."""
    fields = {
        "samples": tuple(range(100 * rank + 4 * number, 100 * rank + 4 * number + 4)),
        "loss": (1.0 / number).hex(),
        "lr": {"optimizer": ((0.1 / number).hex(),)},
        "norm": float(number).hex(),
        "metrics": {"accuracy": (0.01 * number).hex()},
        "parts": {name: f"{name}@{number}" for name in PARTS},
    }
    return replace(Stepped(step=number, time=0.0, **fields), **changes)


def run(*steps: Stepped, rank: int = 0, incarnation: int = 1, at: int = 0, world: int = 1, parts=None) -> Run:
    began = Began(
        rank=rank, world=world, incarnation=incarnation, step=at, restored=at > 0, parts=parts or {}, time=0.0
    )
    return Run(began, steps)


def trace(*runs: Run) -> Trace:
    ranks: dict[int, tuple[Run, ...]] = {}
    for one in runs:
        ranks[one.began.rank] = (*ranks.get(one.began.rank, ()), one)
    return Trace("", ranks)


WHOLE = trace(run(*map(step, range(1, 9))))


def resumed(changed: Stepped | None = None, *, at: int = 4, parts=None) -> Trace:
    """Stopped after step ``at``, resumed, and all as it should be but for one step."""
    steps = {number: step(number) for number in range(1, 9)}
    if changed is not None:
        steps[changed.step] = changed
    first = [steps[number] for number in range(1, at + 1)]
    second = [steps[number] for number in range(at + 1, 9)]
    return trace(run(*first), run(*second, incarnation=2, at=at, parts=parts))


def first(other: Trace, reference: Trace = WHOLE):
    found = compare(reference, other, exact=True, tolerance=0.0)
    assert not found.equal
    return found.first


def said(other: Trace, reference: Trace = WHOLE) -> str:
    return " ".join(first(other, reference).causes)


# --- the same ranks -------------------------------------------------------------------------------------------------


def test_a_resumed_run_that_is_the_one_that_would_have_been_is_equal():
    found = compare(WHOLE, resumed(), exact=True, tolerance=0.0)
    assert found.equal
    assert (found.steps, found.differing, found.first, found.notes) == (8, 0, None, ())


def test_steps_made_again_after_a_crash_count_each_and_a_save_in_between_is_no_step():
    again = trace(
        run(*map(step, range(1, 7)), incarnation=1),
        Run(Began(rank=0, world=1, incarnation=2, step=4, restored=True), (Saved(step=5, event="due"), step(5))),
        run(*map(step, range(5, 9)), incarnation=5, at=4),
    )
    assert compare(WHOLE, again, exact=True, tolerance=0.0).steps == 6 + 1 + 4
    worse = trace(again.ranks[0][0], again.ranks[0][1], run(step(5, norm="inf"), step(6), incarnation=5, at=4))
    found = first(worse)
    assert (found.start, found.step, found.what) == (3, 5, "norm")


def test_nan_and_the_sign_of_zero_are_compared_by_their_bits():
    nan = trace(run(step(1, loss="nan")))
    assert compare(nan, nan, exact=True, tolerance=0.0).equal
    assert first(trace(run(step(1, loss="-0x0.0p+0"))), trace(run(step(1, loss="0x0.0p+0")))).found == "-0.0"


def test_the_first_difference_is_the_earliest_step_then_the_cause_and_not_the_effect():
    steps = [step(n) for n in range(1, 9)]
    for late, fields in (
        (7, {"samples": (1,)}),
        (6, {"loss": "0x1p+0", "norm": "0x1p+0", "lr": {"optimizer": ("0x1p+0",)}}),
    ):
        steps[late - 1] = replace(steps[late - 1], **fields)
    found = compare(WHOLE, trace(run(*steps)), exact=True, tolerance=0.0)
    assert found.differing == 2
    assert (found.first.step, found.first.what, found.first.others) == (6, "lr/optimizer", ("loss", "norm"))
    assert (found.first.expected, found.first.found) == (repr(0.1 / 6), "1.0")
    assert str(found.first).startswith("step 6, rank 0, start 1: lr/optimizer is 1.0, not 0.01666")


def test_ranks_are_compared_each_with_itself():
    reference = trace(*(run(step(1, rank), step(2, rank), rank=rank, world=2) for rank in (0, 1)))
    assert compare(reference, reference, exact=True, tolerance=0.0).steps == 2
    swapped = trace(*(run(step(1, 1 - rank), step(2, rank), rank=rank, world=2) for rank in (0, 1)))
    found = first(swapped, reference)
    assert (found.step, found.rank, found.what) == (1, 0, "samples")
    alien = trace(*reference.ranks[0], *reference.ranks[1], run(step(1, 2), rank=2, world=3))
    assert first(alien, reference).rank == 2


def test_parts_of_a_step_have_a_place_of_their_own():
    window = [step(1), step(1, micro=1, loss="0x1p+0"), step(1, micro=2), step(2)]
    reference = trace(run(*window))
    assert compare(reference, reference, exact=True, tolerance=0.0).steps == 2
    resumed_inside = trace(run(*window[2:], incarnation=2, at=1))
    assert compare(reference, resumed_inside, exact=True, tolerance=0.0).equal
    found = first(trace(run(window[0], step(1, micro=1), *window[2:])), reference)
    assert (found.step, found.micro, found.what) == (1, 1, "loss")


def test_steps_that_are_passed_over_or_beyond_the_reference_are_differences():
    found = first(trace(run(step(6), step(7), at=4)))
    assert (found.step, found.what, found.expected) == (6, "progress", "step 5")
    found = first(trace(run(step(8), step(9), at=7)))
    assert (found.step, found.what, found.found) == (9, "progress", "a step beyond it")


# --- causes ---------------------------------------------------------------------------------------------------------


def test_samples_of_another_step_say_how_far_the_position_is_off():
    assert "at step 4: the data's position is 1 step too early" in said(resumed(step(5, samples=step(4).samples)))
    assert "at step 8: the data's position is 3 steps too far" in said(resumed(step(5, samples=step(8).samples)))
    assert "at step 1: the data's position is 4 steps too early" in said(resumed(step(5, samples=step(1).samples)))
    # An epoch like any other is begun anew: not one step ahead, though that is nearer.
    again = trace(run(*(step(n, samples=(n % 4,)) for n in range(1, 9))))
    text = said(trace(run(step(4, samples=(1,)), at=3)), again)
    assert "at step 1: the data's position is 3 steps too early" in text


def test_the_same_samples_in_another_order_and_others_altogether_are_told_apart():
    assert "in another order" in said(resumed(step(5, samples=tuple(reversed(step(5).samples)))))
    assert "the order itself is another one" in said(resumed(step(5, samples=(900, 901))))
    mixed = {**step(4).parts, "rng/torch": "?"}
    text = said(resumed(step(5, samples=(900, 901)), parts=mixed))
    assert "rng/torch differed before this step" in text


def test_a_batch_without_ids_points_at_the_data():
    reference = trace(run(*(step(n, samples=None, batch=f"b{n}") for n in (1, 2, 3))))
    other = trace(run(step(1, samples=None, batch="b1"), step(2, samples=None, batch="b1")))
    found = first(other, reference)
    assert (found.what, found.expected, found.found) == ("batch", "b2", "b1")
    assert "1 step too early" in said(other, reference)
    assert "TrainState(data=" in said(trace(run(step(1, samples=None, batch="x"))), reference)


def test_a_learning_rate_points_at_the_scheduler():
    text = said(resumed(step(5, lr=step(1).lr), parts={**step(4).parts, "scheduler": "?"}))
    assert "learning rate of step 1: the scheduler stands at another position" in text
    assert "TrainState(scheduler=...)" in text
    assert "TrainState(scheduler=...)" in said(resumed(step(5, lr=step(1).lr)))


def test_a_learning_rate_that_differs_where_all_came_back_was_changed_behind_a_boundary():
    text = said(resumed(step(5, lr=step(4).lr), parts=step(4).parts))
    assert "learning rate of step 4" in text
    assert "belongs before the last `ckpt.step()` of that epoch" in text
    assert "TrainState(scheduler=...)" not in text


def test_a_loss_is_explained_by_what_differed_before_it():
    other = resumed(step(5, loss="0x1p+0"), parts={**step(4).parts, "model": "?"})
    assert first(other).before == ("model",)
    assert "parameters or buffers already differed after the restore" in said(other)
    drawn = resumed(step(5, loss="0x1p+0"), parts={**step(4).parts, "rng/torch": "?"})
    assert "rng/torch stood elsewhere before this step: dropout" in said(drawn)
    blank = resumed(step(5, loss="0x1p+0"), parts=step(4).parts)
    assert "buffers (also those that are not persistent)" in said(blank)


def test_a_loss_whose_batch_nobody_knows_may_come_of_another_batch():
    def unknown(number, **changes):
        return step(number, samples=None, **changes)

    reference = trace(run(*map(unknown, range(1, 9))))
    other = trace(run(unknown(5, loss="0x1p+0"), at=4, parts=step(4).parts))
    assert first(other, reference).what == "loss"
    assert said(other, reference).startswith(
        "What the step was given is not in the trace, so it may have been another batch"
    )
    assert "Batch and learning rate are the same" not in said(other, reference)
    drawn = trace(run(unknown(5, loss="0x1p+0"), at=4, parts={**step(4).parts, "rng/torch": "?"}))
    assert [text.split()[0] for text in first(drawn, reference).causes] == ["rng/torch", "What"]
    known = trace(run(unknown(5, loss="0x1p+0"), at=4, parts={**step(4).parts, "model": "?"}))
    assert len(first(known, reference).causes) == 1


@pytest.mark.parametrize("changes", [{"loss": "0x1p+0"}, {"batch": "other", "samples": None}], ids=["loss", "batch"])
def test_a_stream_that_stood_where_it_should_and_moves_otherwise_is_drawn_from_more_often(changes):
    moved = step(5, parts={**step(5).parts, "rng/torch": "?"}, **changes)
    words = "rng/torch stood as in the reference before this step, and elsewhere after it"
    assert words in said(resumed(moved, parts=step(4).parts))
    assert words in said(trace(run(step(4), moved, at=3, parts=step(3).parts)))
    assert words not in said(resumed(moved, parts={**step(4).parts, "rng/torch": "?"}))
    # Where nobody knows how it stood, nothing is said.
    assert words not in said(resumed(moved, parts={}))


def test_what_is_not_compared_is_no_cause_either():
    other = resumed(step(5, loss="0x1p+0"), parts={**step(4).parts, "rng/python": "?"})
    found = compare(WHOLE, other, exact=True, tolerance=0.0, ignore=("rng/python",)).first
    assert (found.what, found.before) == ("loss", ())
    assert "rng/python" not in " ".join(found.causes)


@pytest.mark.parametrize(
    ("changes", "what", "word"),
    [
        ({"norm": "0x1p+0"}, "norm", "gradients accumulated before the save"),
        ({"metrics": {}}, "metrics/accuracy", "the number itself"),
        ({"parts": step(5).parts | {"model": "?", "optimizer": "?"}}, "model", "moments, step counts"),
        ({"parts": step(5).parts | {"optimizer": "?", "rng/torch": "?"}}, "optimizer", "weight decay"),
        ({"parts": step(5).parts | {"scheduler": "?"}}, "scheduler", "learning rates will differ later"),
        ({"parts": step(5).parts | {"scaler": "?"}}, "scaler", "Only the loss scaler differs"),
        ({"parts": step(5).parts | {"data": "?"}}, "data", "later batches may differ"),
        ({"parts": step(5).parts | {"rng/torch": "?", "rng/python": "?"}}, "rng/python", "rng/python, rng/torch"),
        ({"parts": step(5).parts | {"counters": "?"}}, "counters", "Only 'counters' differs"),
    ],
)
def test_what_differs_alone_has_an_explanation_of_its_own(changes, what, word):
    other = resumed(step(5, **changes))
    assert (first(other).step, first(other).what) == (5, what)
    assert word in said(other)


def test_an_update_that_differs_names_the_part_that_differed_before_it():
    other = resumed(step(5, parts={**step(5).parts, "model": "?"}), parts={**step(4).parts, "optimizer": "?"})
    assert said(other).startswith("the optimizer's state already differed before this step.")


def with_more(number: int, **changes) -> Stepped:
    """A step of a state that has two components of names that nobody knows."""
    return step(number, parts={**step(number).parts, "average": "@", "tutor": "@"} | changes)


def test_a_component_of_any_name_comes_after_those_whose_part_in_an_update_is_known():
    reference = trace(run(*map(with_more, range(1, 9))))
    other = trace(run(with_more(5, average="?", model="?", optimizer="?"), at=4))
    assert (first(other, reference).what, first(other, reference).others) == ("model", ("optimizer", "average"))


def test_what_does_not_differ_alone_is_not_said_to():
    reference = trace(run(*map(with_more, range(1, 9))))
    both = with_more(5, average="?", tutor="?")
    other = trace(run(both, at=4, parts=with_more(4, average="?").parts))
    assert said(other, reference) == "average already differed before this step."
    other = trace(run(both, at=4, parts=with_more(4).parts))
    assert said(other, reference) == "average, tutor differ: is all that they are computed from in TrainState?"


# --- another number of ranks ----------------------------------------------------------------------------------------


def shared(number: int, rank: int, world: int, *, batch: int = 12, drawn: bool = False, **changes) -> Stepped:
    """This rank's share of a step of ``batch`` samples, whose loss is the mean of its samples' own."""
    ids = range(batch * number + rank * batch // world, batch * number + (rank + 1) * batch // world)
    loss = sum(1 / (1 + i) for i in ids) / len(ids)
    parts = {"model": "m", "rng/torch": f"{rank}@{number if drawn else 0}"}
    return Stepped(step=number, **{"samples": tuple(ids), "loss": loss.hex(), "parts": parts, "time": 0.0} | changes)


def on(world: int, steps=range(1, 9), *, changed=None, **options) -> Trace:
    """Steps on so many ranks; ``changed`` maps (step, rank) to fields."""
    changed = changed or {}
    at = steps[0] - 1
    return trace(
        *(
            run(
                *(shared(n, rank, world, **options, **changed.get((n, rank), {})) for n in steps),
                rank=rank,
                world=world,
                at=at,
            )
            for rank in range(world)
        )
    )


def worlds(reference: Trace, other: Trace, tolerance: float = 1e-5):
    return compare(reference, other, exact=False, tolerance=tolerance)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_other_ranks_with_the_same_samples_and_losses_hold(world):
    found = worlds(on(2), on(world, range(5, 9)))
    assert found.equal
    assert (found.steps, found.notes) == (4, ())
    assert found.worst is not None
    assert found.worst.apart < 1e-12


def test_a_sample_that_is_skipped_or_repeated_on_other_ranks_is_found():
    ids = shared(6, 1, 3).samples
    found = worlds(on(2), on(3, range(5, 9), changed={(6, 1): {"samples": (*ids[:-1], 3)}}))
    assert (found.first.step, found.first.rank, found.first.what) == (6, None, "samples")
    assert found.first.found == f"1 skipped: {ids[-1]}; 1 not expected: 3"
    assert "one order for any number of ranks" in found.first.causes[0]


def test_a_sample_too_few_in_one_step_is_that_step_s_difference():
    ids = shared(6, 1, 3).samples
    found = worlds(on(2), on(3, range(5, 9), changed={(6, 1): {"samples": ids[1:]}}))
    assert (found.first.step, found.first.found) == (6, f"1 skipped: {ids[0]}")


def test_two_ranks_that_were_dealt_one_share_are_found_at_once():
    twice = {(n, 0): {"samples": shared(n, 2, 3).samples} for n in range(5, 9)}
    found = worlds(on(2), on(3, range(5, 9), changed=twice))
    assert (found.first.step, found.first.what) == (5, "samples")
    assert found.first.found.startswith("4 skipped: ")


def test_ranks_that_compute_one_share_together_count_once():
    twice = trace(*(run(*(shared(n, 0, 1) for n in range(1, 9)), rank=rank, world=2) for rank in (0, 1)))
    assert worlds(twice, on(3, range(5, 9))).equal
    # But ranks that should have had shares of their own are caught.
    same = trace(*(run(*(shared(n, 0, 2) for n in range(5, 9)), rank=rank, world=2, at=4) for rank in (0, 1)))
    assert worlds(on(3), same).first.what == "samples"


def test_a_loss_out_of_tolerance_is_found_and_the_worst_is_told():
    far = {(7, 0): {"loss": "0x1p+1"}}
    found = worlds(on(2), on(1, range(5, 9), changed=far))
    assert (found.first.step, found.first.what) == (7, "loss")
    assert (found.worst.step, found.worst.found) == (7, 2.0)
    assert worlds(on(2), on(1, range(5, 9), changed=far), tolerance=1.0).equal
    assert worlds(on(2), on(1, range(5, 9), changed={(7, 0): {"loss": "nan"}})).first.what == "loss"
    assert math.isinf(worlds(on(2), on(1, range(5, 9), changed={(7, 0): {"loss": "nan"}})).worst.apart)


def test_losses_are_not_judged_where_the_reference_drew_random_numbers():
    far = {(7, 0): {"loss": "0x1p+1"}}
    found = worlds(on(2, drawn=True), on(1, range(5, 9), changed=far))
    assert found.equal
    assert found.worst.found == 2.0
    assert found.notes == ("losses from step 5 on were compared, not judged: random numbers were drawn on the ranks",)


def test_losses_are_judged_up_to_the_first_step_that_draws():
    drawn_later = {(n, rank): {"parts": {"rng/torch": f"{rank}@{n}"}} for n in (7, 8) for rank in (0, 1)}
    reference = on(2, changed=drawn_later)
    late = worlds(reference, on(1, range(5, 9), changed={(7, 0): {"loss": "0x1p+1"}}))
    assert late.equal
    assert "losses from step 7 on" in late.notes[0]
    assert worlds(reference, on(1, range(5, 9), changed={(6, 0): {"loss": "0x1p+1"}})).first.step == 6


def test_batches_of_another_size_must_follow_the_same_order():
    found = worlds(on(2, batch=12), on(1, range(1, 7), batch=12))
    assert found.equal
    longer = trace(
        run(*(Stepped(step=n, samples=tuple(range(18 * n - 6, 18 * n + 12)), loss="0x1p+0") for n in (1, 2, 3)))
    )
    found = worlds(on(2, batch=12), longer)
    assert found.equal
    assert any("another number of samples" in note for note in found.notes)
    # An epoch of smaller batches has more steps.
    shorter = trace(
        run(*(Stepped(step=n, samples=tuple(range(6 * n + 6, 6 * n + 12)), loss="0x1p+0") for n in range(1, 13)))
    )
    assert worlds(on(2, batch=12), shorter).equal
    assert found.worst is None
    wrong = trace(run(*(Stepped(step=n, samples=tuple(range(18 * n, 18 * n + 18)), loss="0x1p+0") for n in (1, 2, 3))))
    assert worlds(on(2, batch=12), wrong).first.what == "samples"


def test_what_was_not_traced_is_said_and_not_judged():
    silent = {(n, r): {"samples": None, "loss": None} for n in range(1, 9) for r in range(3)}
    found = worlds(on(2, changed=silent), on(3, range(5, 9), changed=silent))
    assert found.equal
    assert any("no sample ids" in note for note in found.notes)
    assert any("gives none to step(loss=...)" in note for note in found.notes)


def test_parts_of_a_step_are_counted_with_it():
    whole = on(1)
    halves = trace(
        run(
            *(
                part
                for n in range(1, 9)
                for part in (
                    Stepped(step=n - 1, micro=1, samples=shared(n, 0, 1).samples[:6]),
                    shared(n, 0, 1, samples=shared(n, 0, 1).samples[6:]),
                )
            )
        )
    )
    found = worlds(whole, halves)
    assert found.equal
    assert found.steps == 8
