"""How much one has to read at once."""

from __future__ import annotations

import ast

from tests.architecture.source import ROOT, functions, modules

MODULE_LINES = 400
FUNCTION_LINES = 60
PARAMETERS = 6

# What may be larger, and why. "path" for a module's lines, "path::name" for a function's lines or parameters.
EXCEPTIONS: dict[str, str] = {
    "src/keepstep/checkpointer/loop.py::Checkpointer.__init__": "the public constructor: each option is one decision",
    "src/keepstep/checkpointer/alone.py::async_save": "the public call: each of its options answers a question of its own",
    "src/keepstep/cli/converting.py::convert_step": "a command: each of its options answers a question of its own",
    "src/keepstep/cli/copying.py::copy_steps": "a command: each of its options answers a question of its own",
    "src/keepstep/cli/drilling.py::drill_script": "a command: each of its options answers a question of its own",
    "src/keepstep/cli/exporting.py::export_step": "a command: each of its options answers a question of its own",
    "src/keepstep/cli/pruning.py::prune_steps": "a command: each of its options is a rule of its own",
    "src/keepstep/checkpointer/loading.py::load": "the public call: each of its options answers a question of its own",
    "src/keepstep/interop/huggingface/exporting.py::export": "the public call: each option answers a question of its own",
    "src/keepstep/data/loader.py::ResumableLoader.__init__": "in the place of torch's DataLoader, which takes as many",
    "src/keepstep/data/reader.py::StreamReader.__init__": "as the loader: source, streams, batches, ranks, workers",
    "src/keepstep/data/samplers.py::ResumableBatchSampler.__init__": "in the place of torch's samplers: data, cut, ranks",
}


def test_modules_are_short():
    _nothing_but_exceptions(
        {_shown(module): module.lines for module in modules() if module.lines > MODULE_LINES},
        f"lines, more than {MODULE_LINES}",
    )


def test_functions_are_short():
    """From ``def`` to the last line, without the docstring: a contract may be as long as it has to be."""
    long = {}
    for module in modules():
        for name, function in functions(module):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            first = function.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines -= (first.end_lineno or first.lineno) - first.lineno + 1
            if lines > FUNCTION_LINES:
                long[f"{_shown(module)}::{name}"] = lines
    _nothing_but_exceptions(long, f"lines, more than {FUNCTION_LINES}")


def test_functions_take_few_parameters():
    many = {}
    for module in modules():
        for name, function in functions(module):
            spec = function.args
            taken = [a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs) if a.arg not in ("self", "cls")]
            if len(taken) > PARAMETERS:
                many[f"{_shown(module)}::{name}"] = len(taken)
    _nothing_but_exceptions(many, f"parameters, more than {PARAMETERS}")


def test_exceptions_name_what_exists():
    known = {_shown(module) for module in modules()}
    known |= {f"{_shown(module)}::{name}" for module in modules() for name, _ in functions(module)}
    assert not set(EXCEPTIONS) - known


def _shown(module) -> str:
    return str(module.path.relative_to(ROOT))


def _nothing_but_exceptions(found: dict[str, int], what: str) -> None:
    wrong = [f"{name}: {amount} {what}" for name, amount in found.items() if name not in EXCEPTIONS]
    assert not wrong, "\n".join(wrong)
