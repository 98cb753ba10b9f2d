"""The Checkpointer inside of a Hugging Face Trainer: ``train()`` goes on from the newest good step, sample for sample.

The Trainer has no hook between a step with its log and evaluation, and the request for the next batches; and none that can
say where its loop begins. So the methods between which a step is over are wrapped, on the one object that is given here.
Nothing is imported from transformers: whatever subclass of its Trainer it is, it has these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from keepstep.checkpointer import Checkpointer
from keepstep.commit.retention import Keep
from keepstep.data.seeding import SeededCollate, SeededDataset
from keepstep.errors import UsageError
from keepstep.interop.positions import own_or_first
from keepstep.interop.transformers.parts import Batches, TrainerNumbers
from keepstep.state import TrainState, per_rank
from keepstep.state.rng import RngStreams
from keepstep.storage.local import Place

__all__ = ["StepKeeper", "attach"]

_HERE = "the newest good step"
"""Stands for the checkpoint folder that the Trainer's loop asks about."""
_ORDERS = {"random": True, "sequential": False}
_NEEDED = ("_inner_training_loop", "_prepare_for_training", "_run_epoch", "_load_rng_state", "get_batch_samples")
_PASSED_ON = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


def attach(
    trainer: Any, root: Place, *, extra: Mapping[str, Any] | None = None, at_end: bool = True, **options: Any
) -> StepKeeper:
    """From now on ``trainer.train()`` keeps whole steps below ``root``, and begins with the newest good one.

    The state is weights, optimizer, scheduler, gradient scaler, the log and the numbers of the TrainerState, callbacks with
    a state, the loss since the last log, random numbers of every rank, and the position in the data. Steps are saved by
    ``every`` alone, whatever ``save_strategy`` says; "no" is fine. One is saved when the next batches are asked for, behind
    its log and evaluation. So it never lies inside of an update, and none of its microbatches is lost.

    The training data comes in the order of a ResumableBatchSampler with ``args.data_seed`` or ``args.seed``, and is dealt to
    ranks by that; random numbers that data set and collator draw depend on the samples alone.

    Args:
        trainer: a Trainer of transformers 5.20 or newer, or of a subclass, before ``train``.
        root: the run's folder, the same on every rank.
        extra: further components of the state, by name.
        at_end: whether the last step is saved when training ends.
        options: what a ``Checkpointer`` takes: ``every``, ``keep``, ``preempt``, ``trace``, ``background``, ...

    Raises:
        UsageError: not such a Trainer, or one with arguments that cannot be kept exactly; lists them all.
    """
    missing = [name for name in _NEEDED if not callable(getattr(trainer, name, None))]
    if missing:
        raise UsageError(f"a {type(trainer).__name__} has no {', '.join(missing)}: it takes transformers 5.20 or newer")
    args = trainer.args
    wrong = []
    if args.auto_find_batch_size:
        wrong.append("auto_find_batch_size: a batch of another size is another run")
    if getattr(args, "train_sampling_strategy", "random") not in _ORDERS:
        wrong.append(f"train_sampling_strategy={args.train_sampling_strategy!r}: take 'random' or 'sequential'")
    if trainer.is_deepspeed_enabled:
        wrong.append("deepspeed keeps weights where nobody else can name them")
    if trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) == 1:
        wrong.append("FSDP version 1 keeps weights where nobody else can name them: set fsdp_version=2")
    if wrong:
        raise UsageError("this Trainer's steps cannot be kept: " + "; ".join(wrong))
    return StepKeeper(trainer, root, dict(extra or {}), at_end=at_end, options=options)


class _Samples(SeededDataset):
    """The data set, with its length."""

    def __len__(self) -> int:
        return len(self.dataset)


class StepKeeper:
    """What ``attach`` has put into a Trainer. ``checkpointer`` is there while it trains.

    Everything here is called by the Trainer's own loop, on the training thread of every rank.
    """

    def __init__(
        self, trainer: Any, root: Place, extra: dict[str, Any], *, at_end: bool, options: dict[str, Any]
    ) -> None:
        self.checkpointer: Checkpointer | None = None
        self._trainer = trainer
        self._root = root
        self._extra = extra
        self._at_end = at_end
        self._options = options
        self._metric = keep.metric if (keep := options.get("keep") or Keep()).best else ""
        self._numbers = TrainerNumbers(trainer)
        self._batches: Batches | None = None
        self._resumed: tuple[int, int] | None = None
        self._random: dict[str, Any] = {}
        self._at = self._fetched = self._begun = 0
        self._saved = -1
        wraps: dict[str, Callable[..., Any]] = {
            "train": self._begin,
            "_inner_training_loop": self._loop,
            "get_train_dataloader": self._loader,
            "_prepare_for_training": self._prepare,
            "_run_epoch": self._epoch,
            "get_batch_samples": self._fetch,
            "training_step": self._train,
            "_load_rng_state": self._streams,
        }
        for name, wrapped in wraps.items():
            setattr(trainer, name, partial(wrapped, getattr(trainer, name)))
        events = trainer.callback_handler
        events.on_epoch_begin = partial(self._epoch_begins, events.on_epoch_begin)

    # --- in the order in which the Trainer calls them ---

    def _begin(self, own: Callable[..., Any], resume_from_checkpoint: Any = None, *args: Any, **named: Any) -> Any:
        if resume_from_checkpoint:
            raise UsageError(
                f"train(resume_from_checkpoint={resume_from_checkpoint!r}): steps are kept in {self._root}, and train() goes"
                " on from there by itself. To begin with the weights of that checkpoint, load the model from it"
            )
        return own(None, *args, **named)

    def _loop(self, own: Callable[..., Any], *args: Any, **named: Any) -> Any:
        try:
            result = own(*args, **named)
        except BaseException as err:
            checkpointer, self.checkpointer = self.checkpointer, None
            if checkpointer is not None:
                checkpointer.__exit__(type(err), err, err.__traceback__)
            raise
        checkpointer, self.checkpointer = self.checkpointer, None
        if checkpointer is not None:
            checkpointer.close()
        return result

    def _loader(self, own: Callable[[], Any]) -> DataLoader[Any]:
        """The Trainer's loader with the same data, workers and collator, over batches that know where they stand."""
        made, args = own(), self._trainer.args
        dataset = made.dataset
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise UsageError(
                f"a {type(dataset).__name__} has no samples by number: nobody knows which of them were used, so a resumed"
                " run would see others. Give the Trainer a data set with a length"
            )
        self._batches = Batches(
            len(dataset),
            batch_size=self._trainer._train_batch_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=_ORDERS[getattr(args, "train_sampling_strategy", "random")],
            drop_last=args.dataloader_drop_last,
        )
        return DataLoader(
            _Samples(dataset),  # type: ignore[arg-type]  # it is asked for batches only
            batch_sampler=self._batches,  # type: ignore[arg-type]  # torch hands on whatever this gives
            collate_fn=SeededCollate(made.collate_fn),  # type: ignore[arg-type]  # as above
            generator=torch.Generator(),
            **{name: getattr(made, name) for name in _PASSED_ON},
        )

    def _prepare(self, own: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Everything is there when it has returned, and nothing was trained."""
        prepared = own(*args, **named)
        trainer, batches = self._trainer, self._batches
        self._numbers = TrainerNumbers(trainer)
        state = TrainState(
            model=trainer.model_wrapped,
            optimizer=getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            scheduler=getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler),
            scaler=getattr(trainer.accelerator, "scaler", None),
            data=batches,
            trainer=per_rank(self._numbers, own_or_first),
            **self._extra,
        )
        self.checkpointer = Checkpointer(self._root, state, **self._options)
        report = self.checkpointer.restore()
        self._at, self._saved, self._begun, self._resumed = trainer.state.global_step, report.step, 0, None
        if not report.fresh and batches is not None:
            self._resumed = batches.epoch, batches.passed()
            if batches.passed() % trainer.args.gradient_accumulation_steps:
                raise UsageError(
                    f"step {report.step} was saved behind {batches.passed()} batches of the size of now, in epoch"
                    f" {batches.epoch}, which are no whole updates of {trainer.args.gradient_accumulation_steps}. Choose a"
                    " batch size and gradient_accumulation_steps so that an update has as many samples as before"
                )
            self._random = RngStreams().state_dict()
        return prepared

    def _epoch_begins(self, own: Callable[..., Any], args: Any, state: Any, control: Any, **named: Any) -> Any:
        """Callbacks hear of epochs that are trained; random numbers are those of before they did."""
        self._begun += 1
        if self._resumed is not None:
            epoch, passed = self._resumed
            if self._begun <= epoch:
                return control
            if not passed:
                RngStreams().load_state_dict(self._random)
        return own(args, state, control, **named)

    def _epoch(self, own: Callable[..., None], **call: Any) -> None:
        """One pass over the data, or what is left of it."""
        if self._resumed is not None:
            epoch, passed = self._resumed
            state = self._trainer.state
            if state.global_step >= state.max_steps:
                # The Trainer would look only behind one more step.
                self._trainer.control.should_training_stop = True
                return
            if call["epoch"] < epoch:
                return
            self._numbers.enter()
            self._resumed = None
            if passed:
                call |= {
                    "epochs_trained": epoch,
                    "steps_trained_in_current_epoch": passed,
                    "resume_from_checkpoint": _HERE,
                }
        if self._batches is not None:
            self._batches.set_epoch(call["epoch"])
        own(**call)
        self._boundary()
        state = self._trainer.state
        over = state.global_step >= state.max_steps or self._trainer.control.should_training_stop
        # Behind this the Trainer may put the best weights in the place of the last ones.
        if over and self._at_end and self.checkpointer is not None and self._saved != state.global_step:
            self.checkpointer.save()
            self._saved = state.global_step

    def _fetch(self, own: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """The batches of an update are asked for: the one before is over."""
        self._boundary()
        found = own(*args, **named)
        self._fetched = len(found[0])
        return found

    def _streams(self, own: Callable[[Any], None], checkpoint: Any) -> None:
        """Random numbers, as the Trainer puts them back: behind the first batches of a resumed run."""
        if checkpoint is _HERE:
            RngStreams().load_state_dict(self._random)
        else:
            own(checkpoint)

    def _train(self, own: Callable[..., torch.Tensor], *args: Any, **named: Any) -> torch.Tensor:
        loss = own(*args, **named)
        self._numbers.losses += loss.detach()
        return loss

    def _boundary(self) -> None:
        state = self._trainer.state
        if self.checkpointer is None or self._batches is None or state.global_step == self._at:
            return
        self._at = state.global_step
        numbers: dict[str, Any] = {"loss": self._numbers.losses}
        self._numbers.losses = 0.0
        watched = next((entry[self._metric] for entry in reversed(state.log_history) if self._metric in entry), None)
        if watched is not None:
            numbers[self._metric] = watched
        samples = self._fetched * self._batches.global_batch_size
        pending = self.checkpointer.step(samples=samples, epoch=int(state.epoch or 0), **numbers)
        if pending is not None:
            self._saved = pending.step
