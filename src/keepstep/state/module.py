"""Modules: names without the marks of wrappers, so that a compiled, wrapped or plain model has the same keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from keepstep.errors import UsageError
from keepstep.format.globs import Globs
from keepstep.format.objects import join

__all__ = [
    "broadcast_buffers",
    "clean_names",
    "is_extra_state",
    "left_out_of",
    "module_state",
    "parameter_names",
    "passing_hint",
    "saved_state",
    "unwrap",
]

_MARKS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_LOADING_METHODS = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
_REPLICATING = ("DistributedDataParallel", "DataParallel")


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside data-parallel and compile wrappers."""
    while True:
        inner = _inner(module)
        if inner is None:
            return module
        module = inner


def broadcast_buffers(module: nn.Module) -> bool:
    """Whether DistributedDataParallel overwrites the buffers with those of its first rank before every forward."""
    seen: nn.Module | None = module
    while seen is not None:
        if type(seen).__name__ == "DistributedDataParallel":
            return bool(getattr(seen, "broadcast_buffers", False))
        seen = _inner(seen)
    return False


def clean_names(module: nn.Module, names: list[str]) -> dict[str, str]:
    """Each name of a state_dict without the segments that wrappers inside the module add.

    Raises:
        UsageError: two names become the same.
    """
    replicas = []
    if any("module." in name for name in names):
        replicas = [
            f"{path}." if path else ""
            for path, child in module.named_modules(remove_duplicate=False)
            if type(child).__name__ in _REPLICATING
        ]
    cleaned = {name: _clean(name, replicas) for name in names}
    if len(set(cleaned.values())) != len(cleaned):
        raise UsageError(f"names of {type(module).__name__} are not distinct once wrapper prefixes are removed")
    return cleaned


def module_state(module: nn.Module, *, every_buffer: bool = False) -> dict[str, Any]:
    """The module's state_dict under clean names; tensors are the live ones, extra state is whatever the module gives.

    With ``every_buffer`` also the buffers that are registered as not persistent, after everything else.
    """
    # The parameters themselves: to detach each of them costs more than everything else that is done here.
    state = module.state_dict(keep_vars=True)
    if every_buffer:
        state.update(_passing_buffers(module))
    names = clean_names(module, list(state))
    return {names[name]: value for name, value in state.items()}


def saved_state(state: Any, module: nn.Module, path: str) -> dict[str, Any]:
    """What is saved of a module in a state: all of it but the keys that a TrainState leaves out."""
    tree = module_state(module, every_buffer=getattr(state, "non_persistent_buffers", False))
    left_out: Globs | None = getattr(state, "leave_out", None)
    if left_out is None:
        return tree
    return {name: value for name, value in tree.items() if not left_out.takes(join(path, name))}


def left_out_of(state: Any) -> tuple[str, ...]:
    """The patterns of keys that a state leaves out of what is saved of its modules."""
    left_out: Globs | None = getattr(state, "leave_out", None)
    return () if left_out is None else left_out.patterns


def passing_hint(module: nn.Module, name: str) -> str:
    """What to add where only one side has this clean name: words for a buffer that is not persistent, else nothing."""
    passing = clean_names(module, list(_passing_buffers(module)))
    if name not in passing.values():
        return ""
    return "; it is a buffer that is not persistent, which TrainState(non_persistent_buffers=True) saves and restores"


def _passing_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{path}.{name}" if path else name: buffer
        for path, part in module.named_modules(remove_duplicate=False)
        for name, buffer in part._buffers.items()
        if buffer is not None and name in part._non_persistent_buffers_set
    }


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Clean names by the identity of each parameter; a tied parameter has its first name."""
    inner = unwrap(module)
    live = list(inner.named_parameters(remove_duplicate=False))
    names = clean_names(inner, [name for name, _ in live])
    found: dict[int, str] = {}
    for name, parameter in live:
        found.setdefault(id(parameter), names[name])
    return found


def is_extra_state(name: str) -> bool:
    """Whether this entry of a state_dict is what the module's get_extra_state returned: a value of any kind."""
    return name.rpartition(".")[2] == "_extra_state"


def buffer_names(module: nn.Module) -> set[str]:
    """Clean names of the module's buffers."""
    inner = unwrap(module)
    live = [name for name, _ in inner.named_buffers(remove_duplicate=False)]
    return set(clean_names(inner, live).values())


def restore_module(module: nn.Module, values: dict[str, Any], filled: set[str]) -> None:
    """Gives a module what could not be read straight into its tensors.

    Args:
        module: the unwrapped module; its parameters and buffers in ``filled`` hold the restored bytes already.
        values: everything of the module's tree by clean name, tensors included.
        filled: clean names whose tensors were read in place.

    ``load_state_dict`` is called once, with complete data, when the module has extra state, hooks of its own, or state
    that is not a parameter or buffer; copying a tensor onto itself is left to PyTorch and changes nothing.
    """
    if not _needs_load(module) and filled.issuperset(values):
        return
    names = clean_names(module, list(module.state_dict()))
    raw = {name: values[clean] for name, clean in names.items() if clean in values}
    with torch.no_grad():
        module.load_state_dict(raw, strict=True)


def _needs_load(module: nn.Module) -> bool:
    """Whether loading this module runs code of its user: hooks, or methods that a class of theirs overrides."""
    for child in module.modules():
        hooks = [*child._load_state_dict_pre_hooks.values(), *child._load_state_dict_post_hooks.values()]
        overridden = [getattr(type(child), name) for name in _LOADING_METHODS]
        for code in (*hooks, *overridden):
            if not (getattr(getattr(code, "hook", code), "__module__", "") or "").startswith("torch"):
                return True
    return False


def _inner(module: nn.Module) -> nn.Module | None:
    if type(module).__name__ in _REPLICATING:
        return module.module  # type: ignore[return-value]
    inner = module._modules.get("_orig_mod")
    return inner if type(module).__name__ == "OptimizedModule" else None


def _clean(name: str, replicas: list[str]) -> str:
    for prefix in replicas:
        if name.startswith(f"{prefix}module."):
            name = prefix + name[len(prefix) + len("module.") :]
    if "_" not in name or not any(mark in name for mark in _MARKS):
        return name
    return ".".join(part for part in name.split(".") if part not in _MARKS)
