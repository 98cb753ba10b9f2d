"""Named places on the way of a step where a test, or a person who doubts, may make something happen.

At each of them the interpreter's own audit hooks are called with ``keepstep.point`` and the name; a hook may raise, wait, or
kill the process. Nothing is switched on or off here, and nothing is kept: where no hook was added (``sys.addaudithook``),
reaching a point costs about as much as calling an empty function. What a hook raises takes the way of any other error.
"""

from __future__ import annotations

import sys

__all__ = ["EVENT", "POINTS", "reach"]

EVENT = "keepstep.point"
POINTS: dict[str, str] = {
    "wait": "training waits for an arena that an earlier save still uses",
    "capture": "the state is about to be read",
    "plan": "who writes what, or, in a load, which bytes go where, is about to be settled",
    "copy": "tensors are about to be copied into the arena",
    "compare": "replicas are about to be compared",
    "write": "this rank waits for its writers, or is about to finish its files",
    "submit": "the copy is made, and about to be handed to whoever finishes the save in the background",
    "commit": "this rank's files are durable, its receipt is about to be sent",
    "receipts": "the coordinator has all receipts, and has not looked at them",
    "publish": "the receipts are right; the manifest is about to be put in place",
    "published": "the step exists; nobody was told, nothing was tidied up",
    "latest": "the hint is about to be moved",
    "tidy": "what may be removed is about to be found out",
    "remove": "a step has lost its manifest, and still has its files",
    "choose": "the step to be restored is about to be chosen",
    "read": "tensors are about to be read into the target",
    "agree": "this rank has read everything; the others may not have",
    "finish": "all ranks have read everything; plain values are about to be given back",
}
"""Every point, with what is true there."""


def reach(point: str) -> None:
    """Calls the audit hooks of this process, on this thread, with the point's name. Raises what they raise."""
    sys.audit(EVENT, point)
