"""Writes the golden checkpoint of the current format version: ``python -m tests.golden.make``.

Once for every version, before its release. What a release has written is never made again: old files must be read for
ever, and a reader that only reads what it has just written proves nothing.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import keepstep as ks
from keepstep.format.manifest import FORMAT_MAJOR, FORMAT_MINOR
from tests.golden.state import own, tensors, values
from tests.helpers.ranks import run_ranks

HERE = Path(__file__).parent


def save(rank: int, folder: str) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    whole = tensors()
    model = dict(whole)
    model["float32"] = distribute_tensor(whole["float32"], mesh, [Shard(0)])
    model["bfloat16"] = distribute_tensor(whole["bfloat16"], mesh, [Shard(1)])
    model["large"] = ks.sharded(
        whole["large"][100 * rank : 100 + 200 * rank], global_shape=(300, 20), offsets=(100 * rank, 0)
    )
    model["tied"] = model["complex128"]
    ks.save(
        folder,
        {"model": model, "values": values(), "own": ks.per_rank(own(rank), on_world_change="same_rank")},
        step=1200,
    )


def main() -> int:
    folder = HERE / f"{FORMAT_MAJOR}.{FORMAT_MINOR}"
    if folder.exists():
        print(f"{folder} is there already; a released version stays as it is", file=sys.stderr)
        return 1
    run_ranks(2, save, str(folder / "step"))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}\n" for path in files
    ]
    (folder / "checksums.txt").write_text("".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
