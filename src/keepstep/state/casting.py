"""Which tensors a load converts, and to what: patterns of keys, of which the first that fits decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import torch

from keepstep.errors import UsageError
from keepstep.format.globs import Globs, near
from keepstep.format.objects import TensorRef
from keepstep.state.shard import dtype_name, torch_dtype

__all__ = ["Cast", "Casts"]

Cast = bool | torch.dtype | Mapping[str, torch.dtype | bool | None]
"""True: to whatever the target has. A dtype: to that one, as ``{"**": dtype}`` says it too. None or False: as saved."""


class Casts:
    """What ``cast=`` says of each tensor.

    A dtype is for tensors of its own kind: a floating one leaves integers alone. Nor is it for tensors of no dimensions,
    such as the step counts of an optimizer, which would soon stand still: these take what the target has.
    """

    def __init__(self, cast: object) -> None:
        """Reads the rules.

        Raises:
            UsageError: they are neither a dtype nor patterns with dtypes.
        """
        rules = {"**": cast} if isinstance(cast, torch.dtype) else cast
        if not isinstance(rules, Mapping):
            raise UsageError(f"cast={cast!r}: True, a torch.dtype, or {{pattern: torch.dtype, True or None}}")
        strange = [f"{pattern!r}: {to!r}" for pattern, to in rules.items() if not _is_rule(to)]
        if strange:
            raise UsageError(f"cast={{{', '.join(strange)}}}: a pattern has a torch.dtype, True or None")
        self._rules = [(Globs([pattern], "cast"), to) for pattern, to in rules.items()]
        self._known: dict[str, str | bool] = {}

    def of(self, path: str, ref: TensorRef) -> str | bool:
        """The name of the dtype it has to have in the target; True for whichever the target has, False for as saved."""
        known = self._known.get(path)
        if known is None:
            to = next((to for globs, to in self._rules if globs.takes(path)), None)
            known = bool(to)
            if isinstance(to, torch.dtype):
                alike = _suits(to, ref)
                known = (dtype_name(to) or False) if alike and ref.shape else alike
            self._known[path] = known
        return known

    def made(self, path: str, ref: TensorRef) -> TensorRef:
        """What memory is made for it, where the target has none."""
        to = self.of(path, ref)
        return msgspec.structs.replace(ref, dtype=to) if isinstance(to, str) else ref

    def check(self, tensors: Mapping[str, TensorRef | None]) -> None:
        """Every pattern fits some of these; None stands for what is not known to be a tensor.

        Raises:
            UsageError: lists the patterns that fit nothing.
        """
        idle = []
        for globs, to in self._rules:
            keys: Iterable[str] = tensors
            if isinstance(to, torch.dtype):
                keys = [key for key, ref in tensors.items() if ref is None or _suits(to, ref)]
            for pattern in globs.idle(keys):
                kind = f" that can be {str(to).removeprefix('torch.')}" if globs.idle(tensors) == [] else ""
                hint = "" if kind else near(pattern, list(tensors))
                idle.append(f"cast={pattern!r}: no tensor of the checkpoint{kind} fits{hint}")
        if idle:
            raise UsageError(f"{'; '.join(idle)}. Nothing was changed")


def _is_rule(to: object) -> bool:
    return to is None or isinstance(to, bool) or (isinstance(to, torch.dtype) and dtype_name(to) is not None)


def _suits(to: torch.dtype, ref: TensorRef) -> bool:
    """Whether a tensor is of the kind of a dtype: floating, complex, or whole numbers."""
    saved = torch_dtype(ref.dtype)
    alike = (saved.is_floating_point, saved.is_complex) == (to.is_floating_point, to.is_complex)
    return alike and ref.form != "array"
