"""Bugs planted into the protocol, one of each kind that a protocol like this can have: every one has to be found."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from keepstep.agent import board, hub
from keepstep.checkpointer import course, decisions, pending, restoring, saving
from keepstep.commit import conclude, publish, retention
from keepstep.commit.catalog import Found
from keepstep.copies import levels
from keepstep.format.manifest import MANIFEST_NAME, parse_step_name, step_name


def no_look_before_the_commit(plant):
    """An old start that wakes up commits beside, or in the place of, steps of the new one."""
    plant.setattr(publish, "is_overtaken", lambda run, incarnation: False)


def no_look_before_a_sweep(plant):
    """What one start takes for the remains of a dead attempt is what a later one is writing."""
    plant.setattr(retention, "is_overtaken", lambda run, incarnation: False)


def latest_before_the_manifest(plant):
    """The hint moves to a step that does not exist yet."""
    commit = publish.commit_step

    def early(storage, manifest, receipts, *, run, **options):
        if run is not None:
            publish.point_latest(run, manifest, "0" * 16)
        return commit(storage, manifest, receipts, run=run, **options)

    for module in (board, saving):
        plant.setattr(module, "commit_step", early)


def manifest_before_the_receipts(plant):
    """The step is announced when its saves begin, and not when they are durable."""
    decide = board.Board._next

    def early(self):
        for name in self._order:
            attempt = self._attempts[name]
            if not attempt.decided.done() and attempt.order is not None and not attempt.failures:
                return attempt
        return decide(self)

    def filled(self, attempt):
        begin = attempt.begin
        one = next(iter(attempt.receipts.values()))
        for rank in range(begin.world):
            files = {name: msgspec.structs.replace(record, rank=rank) for name, record in one.files.items()}
            attempt.receipts.setdefault(rank, msgspec.structs.replace(one, rank=rank, files=files))
        return whole(self, attempt)

    whole = board.Board._decide
    plant.setattr(board.Board, "_next", early)
    plant.setattr(board.Board, "_decide", filled)


def retention_counts_what_was_never_committed(plant):
    """Folders are counted as steps: the good ones go, the unfinished ones stay."""
    look = conclude.read_catalog

    def counting(root):
        catalog = look(root)
        run = catalog.steps[0].run if catalog.steps else ""
        high = max((found.incarnation for found in catalog.steps), default=0)
        names = {folder: parse_step_name(folder) for folder in root.folders()}
        known = {found.step for found in catalog.steps}
        more = [Found(step, run, high, "none") for step in names.values() if step is not None and step not in known]
        steps = sorted((*catalog.steps, *more), key=lambda found: found.order, reverse=True)
        return replace(catalog, steps=tuple(steps))

    plant.setattr(conclude, "read_catalog", counting)


def retention_forgets_what_was_restored(plant):
    """The step that the run came from is not protected."""
    plant.setattr(course.Course, "protected", property(lambda self: ()))


def data_goes_before_the_manifest(plant):
    """For an instant a step exists whose data is gone."""

    def remove(root, found, incarnation):
        storage = conclude_storage(root, found.step)
        names = [name for name, _ in storage.list("")]
        storage.delete([*(name for name in names if name != MANIFEST_NAME), MANIFEST_NAME])

    conclude_storage = retention.step_storage
    plant.setattr(conclude, "remove_step", remove)


def a_sweep_after_every_commit(plant):
    """Without a new start that fences it, it takes the files of attempts that are alive."""
    tidy = conclude.tidy

    def sweeping(root, order, manifest):
        tidy(root, order, manifest)
        retention.sweep_leftovers(root, conclude.read_catalog(root), manifest.lineage.incarnation)

    for module in (board, saving):
        plant.setattr(module, "tidy", sweeping)


def failed_attempts_are_swept_while_alive(plant):
    """A save that was given up at its deadline may still be committed by the storage that was slow."""
    plant.setattr(pending.Pending, "may_appear", property(lambda self: False))


def receipts_of_another_attempt(plant):
    """Receipts are known by their step, not by their attempt: one that comes late is taken for one of the next try."""
    receive = board.Board.receive

    def by_step(self, part, place=None):
        old = self._attempts.get(part.attempt)
        if old is not None and old.decided.done() and part.receipt is not None:
            for name, attempt in self._attempts.items():
                if attempt.begin.step == old.begin.step and not attempt.decided.done():
                    receipt = msgspec.structs.replace(part.receipt, save_id=name)
                    part = msgspec.structs.replace(part, attempt=name, receipt=receipt)
        receive(self, part, place)

    plant.setattr(board.Board, "receive", by_step)


def each_rank_chooses_for_itself(plant):
    """What to restore is looked up by every rank, at its own time."""
    restore = restoring.restore_step

    def alone(ranks, root, state, wanted, **options):
        report, manifest = restore(ranks, root, state, wanted, **options)
        mine = levels.read_catalog(root).steps
        if wanted.step is None and mine:
            manifest = restoring.parse_manifest(
                decisions.found_manifest(decisions.step_storage(root, mine[0].step)), ""
            )
        return report, manifest

    plant.setattr(restoring, "restore_step", alone)


def newest_by_number(plant):
    """The step with the highest number is restored, whichever start it is from."""
    look = levels.read_catalog

    def by_number(root):
        catalog = look(root)
        steps = sorted(catalog.steps, key=lambda found: found.step, reverse=True)
        return replace(catalog, steps=tuple(steps))

    plant.setattr(levels, "read_catalog", by_number)


def nobody_watches_deadlines(plant):
    """A save whose part never comes is never decided."""
    plant.setattr(board.Board, "_watch_deadlines", lambda self: None)
    plant.setattr(hub.Hub, "_late", lambda self, begin: None)


def a_failure_is_not_told(plant):
    """A rank that cannot do its part keeps it to itself."""
    plant.setattr(hub.Hub, "abort", lambda self, abort: None)
    plant.setattr(board.Board, "_watch_deadlines", lambda self: None)


def no_sweep_at_the_start(plant):
    """What dead attempts leave stays for ever."""
    plant.setattr(course, "sweep_leftovers", lambda *_: None)


def a_commit_out_of_order(plant):
    """Of two saves in progress the younger one, done first, is committed first; then the older appears behind it."""

    def any_done(self):
        for name in reversed(self._order):
            attempt = self._attempts[name]
            if not attempt.decided.done() and (attempt.failures or len(attempt.receipts) == attempt.begin.world):
                return attempt
        return None

    plant.setattr(board.Board, "_next", any_done)


def leftovers_by_folder(plant):
    """After a commit everything else in the folder goes, whoever put it there."""
    commit = publish.commit_step

    def cleaning(storage, manifest, receipts, *, leftovers, **options):
        done = commit(storage, manifest, receipts, leftovers=leftovers, **options)
        root = options["run"]
        names = [name for name, _ in root.list("") if name.startswith("step-") and step_name(manifest.step) not in name]
        committed = {step_name(found.step) for found in conclude.read_catalog(root).steps}
        root.delete([name for name in names if name.partition("/")[0] not in committed])
        return done

    for module in (board, saving):
        plant.setattr(module, "commit_step", cleaning)


PLANTS = {
    no_look_before_the_commit: {"zombie", "newest", "lost", "whole"},
    no_look_before_a_sweep: {"whole", "lost"},
    latest_before_the_manifest: {"hint"},
    manifest_before_the_receipts: {"whole"},
    retention_counts_what_was_never_committed: {"lost", "newest"},
    retention_forgets_what_was_restored: {"lost"},
    data_goes_before_the_manifest: {"whole"},
    a_sweep_after_every_commit: {"whole"},
    failed_attempts_are_swept_while_alive: {"whole"},
    receipts_of_another_attempt: {"whole"},
    each_rank_chooses_for_itself: {"agreement"},
    newest_by_number: {"newest", "zombie", "lost", "agreement"},
    nobody_watches_deadlines: {"deadline", "hang"},
    a_failure_is_not_told: {"deadline", "hang"},
    no_sweep_at_the_start: {"leftovers"},
    a_commit_out_of_order: {"order"},
    leftovers_by_folder: {"whole"},
}
"""Each bug, and which promises it may be found to break."""
