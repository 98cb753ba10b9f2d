"""What the shell completes: steps, keys, components, and the names of formats. Nothing where nothing is known; no errors."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from keepstep.cli.formats import FORMATS, found_at
from keepstep.cli.places import root_at
from keepstep.commit.catalog import read_catalog
from keepstep.errors import CheckpointError
from keepstep.format.manifest import Manifest, parse_step_name
from keepstep.storage.local import storage_of

__all__ = ["known_components", "known_formats", "known_keys", "known_numbers", "known_steps"]

MOST_KEYS = 1000


def known_keys(ctx: typer.Context, incomplete: str) -> list[str]:
    """The keys of the step on the command line that begin like this."""
    manifest = _manifest(ctx)
    keys = (*(spec.key for spec in manifest.tensors), *manifest.aliases, *manifest.components) if manifest else ()
    return _begun(keys, incomplete)


def known_components(ctx: typer.Context, incomplete: str) -> list[str]:
    """The components of the step on the command line that begin like this."""
    manifest = _manifest(ctx)
    return _begun((*manifest.components,) if manifest else (), incomplete)


def known_formats(incomplete: str) -> list[str]:
    """The formats that a step can be written in."""
    return _begun(FORMATS, incomplete)


def known_steps(incomplete: str) -> list[str]:
    """The steps of the run at a URL, which no shell looks into; paths are completed by the shell itself."""
    root, slash, begun = incomplete.rpartition("/")
    if "://" not in root or not slash:
        return []
    try:
        names = [name for name in storage_of(root).folders() if parse_step_name(name) is not None]
    except (CheckpointError, OSError):
        return []
    return [f"{root}/{name}" for name in _begun(sorted(names), begun)]


def known_numbers(ctx: typer.Context, incomplete: str) -> list[str]:
    """The numbers of the steps of the run on the command line, the newest first."""
    try:
        catalog = read_catalog(root_at(_given(ctx, "source", "root")))
    except (CheckpointError, OSError):
        return []
    return _begun([str(found.step) for found in catalog.steps], incomplete)


def _manifest(ctx: typer.Context) -> Manifest | None:
    try:
        return found_at(_given(ctx, "step", "source", "first")).manifest
    except (CheckpointError, OSError):
        return None


def _given(ctx: typer.Context, *names: str) -> str:
    """The first of these arguments that is on the command line; before an option's value they have no names yet."""
    named = (str(ctx.params[name]) for name in names if ctx.params.get(name))
    return next(named, ctx.args[0] if ctx.args else "")


def _begun(words: Sequence[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)][:MOST_KEYS]
