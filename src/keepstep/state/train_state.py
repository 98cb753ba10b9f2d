"""The state of a training run as one object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, cast

from keepstep.errors import UsageError
from keepstep.format.globs import Globs
from keepstep.state.accumulation import ACCUMULATION, Accumulation
from keepstep.state.fence import fence
from keepstep.state.files import FILES, Files
from keepstep.state.marks import PerRank
from keepstep.state.progress import Progress
from keepstep.state.provenance import config_record
from keepstep.state.rng import RngStreams

__all__ = ["TrainState"]

_OWN = ("rng", "progress", ACCUMULATION)


class TrainState(Mapping[str, Any]):
    """Everything the next update depends on, by component.

    ``rng`` (python, numpy, torch on the host and every device; per rank) and ``progress`` (step, samples, tokens, epoch)
    are always part of it. Names are free; ``model``, ``optimizer``, ``scheduler``, ``scaler`` and ``data`` are customary.

    Args:
        non_persistent_buffers: whether buffers that modules registered with ``persistent=False`` are saved and restored.
        leave_out: patterns of parameters and buffers that are not saved, such as ``"model/backbone.**"`` for frozen ones. A
            load asks where they are: ``left_out=``.
        files: name → file or folder; their bytes are part of every step, see ``files``.
        config: the run's configuration for the record: a plain value, a mapping, a dataclass or an argparse.Namespace, at
            most 64 KiB as JSON. It is not given back; a load says what differs.
        components: modules, optimizers, schedulers, objects with state_dict/load_state_dict, plain values, dicts, tensors.
            None is left out, so that ``scaler=scaler if amp else None`` works.

    Raises:
        UsageError: a component has one of the names ``rng``, ``progress`` and ``accumulation``; files that cannot be
            attached, all listed; a configuration that is too large.
    """

    def __init__(
        self,
        *,
        non_persistent_buffers: bool = False,
        leave_out: Sequence[str] = (),
        files: Mapping[str, str | PathLike[str]] | None = None,
        config: Any = None,
        **components: Any,
    ) -> None:
        taken = [name for name in _OWN if name in components]
        if taken:
            raise UsageError(f"{', '.join(taken)}: part of every TrainState; give the component another name")
        self.progress = Progress()
        self.fenced_by_hand = False
        self.non_persistent_buffers = non_persistent_buffers
        self.leave_out = Globs(leave_out, "leave_out") if leave_out else None
        self.left_out_from = ""
        self.config_record = config_record(config)
        self._components = {name: value for name, value in components.items() if value is not None}
        if files:
            self._components[FILES] = Files(files)
        self._components["rng"] = PerRank(RngStreams(), "derive")
        self._components["progress"] = self.progress
        self.accumulation = Accumulation(self._components)

    def __getitem__(self, name: str) -> Any:
        """The component of that name."""
        return self.accumulation if name == ACCUMULATION else self._components[name]

    def __iter__(self) -> Iterator[str]:
        """Component names, in the order given; ``accumulation`` only in the middle of an update."""
        yield from self._components
        if self.accumulation.micro:
            yield ACCUMULATION

    def __len__(self) -> int:
        """The number of components, ``rng`` and ``progress`` included."""
        return len(self._components) + bool(self.accumulation.micro)

    def consumed(self, samples: int) -> None:
        """Tells every component that wants to know how many samples all ranks have consumed since the last call."""
        for value in self._components.values():
            inner = value.value if isinstance(value, PerRank) else value
            if not isinstance(inner, type) and callable(getattr(inner, "consumed", None)):
                inner.consumed(samples)

    @property
    def files(self) -> Files:
        """The attached files; after a restore it can write those that the step holds.

        Raises:
            UsageError: none were attached.
        """
        files = self._components.get(FILES)
        if files is None:
            raise UsageError("no files are attached to this state: TrainState(files={name: path}, ...)")
        return cast(Files, files)

    def fence(self) -> None:
        """Call it before changing tensors by hand: waits until a save in progress has copied what it needs.

        Optimizers of ``torch.optim`` do so by themselves before their step. From the first call on, the parameters of all
        modules are copied while training goes on, not only those of the state's optimizers: every change by hand must
        then come after such a call.
        """
        self.fenced_by_hand = True
        fence()

    def replace_value(self, name: str, value: Any) -> None:
        """Puts another plain value in the place of a component that is one; a load uses it."""
        self._components[name] = value

    def __repr__(self) -> str:
        """Component names and types."""
        inside = ", ".join(f"{name}={type(value).__name__}" for name, value in self._components.items())
        return f"TrainState({inside})"
