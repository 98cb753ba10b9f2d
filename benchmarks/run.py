"""Run all benchmarks: make the environment, ask every question, write results and tables.

The peers live in an environment of their own, `.venv-bench`, made from requirements.txt. It is
made again when requirements.txt, pyproject.toml or the interpreter changes. keepstep is installed
there from this checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
ENVIRONMENT = REPOSITORY / ".venv-bench"
PYTHON = ENVIRONMENT / "bin" / "python"
LATEST = HERE / "results" / "latest.json"
QUESTIONS = [
    "save_throughput",
    "load_throughput",
    "reshard",
    "many_tensors",
    "planning",
    "memory",
    "overhead",
    "async_saves",
    "boundary",
    "object_store",
    "share_reads",
    "export",
    "dcp_adapters",
]
MEASURED = [
    "keepstep",
    "torch",
    "torch_checkpointing",
    "nvidia-resiliency-ext",
    "s3fs",
    "s3torchconnector",
    "obstore",
    "numpy",
    "xxhash",
    "msgspec",
]
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes; not for bars, not kept")
    parser.add_argument("--dir", type=Path, default=REPOSITORY, help="where the steps are written")
    parser.add_argument("--only", action="append", choices=QUESTIONS, help="ask only this question")
    parser.add_argument("--write-readme", action="store_true", help="only put the kept results into the READMEs")
    args = parser.parse_args()
    make_environment()
    if args.write_readme:
        return in_environment("--write-readme") if not running_inside() else write_readmes()
    if not running_inside():
        return in_environment(*sys.argv[1:])
    started = time.monotonic()
    found: list[dict] = []
    failed: list[str] = []
    for question in args.only or QUESTIONS:
        try:
            found += ask(question, args)
        except subprocess.CalledProcessError:
            failed.append(question)
    report = {**circumstances(args.dir), "minutes": round((time.monotonic() - started) / 60, 1), "results": found}
    show(report)
    if failed:
        print(f"no answer from {', '.join(failed)} (see above); nothing was kept", file=sys.stderr)
        return 1
    if not args.quick and not args.only:
        LATEST.parent.mkdir(exist_ok=True)
        LATEST.write_text(json.dumps(report, indent=1) + "\n")
    return 0


# ----------------------------------------------------------------------------------- environment


def running_inside() -> bool:
    """Whether this interpreter is the one of the peers' environment."""
    return Path(sys.prefix).resolve() == ENVIRONMENT.resolve()


def in_environment(*arguments: str) -> int:
    """Run this program again with the interpreter of the peers' environment."""
    return subprocess.run([PYTHON, __file__, *arguments], check=False).returncode


def make_environment() -> None:
    """Make the peers' environment, unless what it was made from has not changed."""
    sources = [HERE / "requirements.txt", REPOSITORY / "pyproject.toml"]
    stamp = ENVIRONMENT / "stamp"
    wanted = hashlib.sha256(b"\0".join([sys.version.encode(), *(file.read_bytes() for file in sources)])).hexdigest()
    if running_inside() or (stamp.exists() and stamp.read_text() == wanted):
        return
    print("making .venv-bench (once)", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *extra]
    subprocess.run([*pip, "-r", HERE / "requirements.txt"], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", REPOSITORY], check=True)
    stamp.write_text(wanted)


# --------------------------------------------------------------------------------------- results


def ask(question: str, args: argparse.Namespace) -> list[dict]:
    """The results of one script."""
    command = [PYTHON, HERE / f"{question}.py", "--json", "--dir", args.dir.resolve()]
    answer = subprocess.run([*command, *(["--quick"] if args.quick else [])], check=True, stdout=subprocess.PIPE)
    return json.loads(answer.stdout)


def circumstances(directory: Path) -> dict:
    """Where and when this was measured, and of what."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    return {
        "machine": {
            "processor": _from_proc("/proc/cpuinfo", "model name"),
            "cores": os.cpu_count(),
            "memory": _from_proc("/proc/meminfo", "MemTotal"),
            "kernel": platform.release().split("-")[0],
            "file system": _file_system(directory),
        },
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), **{name: installed(name) for name in MEASURED}},
    }


def _from_proc(file: str, name: str) -> str:
    lines = Path(file).read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "unknown")


def _file_system(directory: Path) -> str:
    """The type of the file system that holds `directory`: that of the longest mount point above it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(mount, kind) for mount, kind in mounts if directory.resolve().is_relative_to(mount)]
    return max(above, key=lambda each: len(each[0]), default=("", "unknown"))[1]


def show(report: dict) -> None:
    """The table, and how many bars hold."""
    from harness import Result, print_table

    results = [Result(**each) for each in report["results"]]
    print_table(results)
    judged = [each for each in results if each.holds is not None]
    print(f"{sum(each.holds for each in judged)} of {len(judged)} bars hold; {report['minutes']} minutes")


# --------------------------------------------------------------------------------------- READMEs


def write_readmes() -> int:
    """Put the kept results between the markers of the READMEs: all of them here, those that have a bar at the top."""
    report = json.loads(LATEST.read_text())
    barred = {**report, "results": [each for each in report["results"] if each["bar"]]}
    for readme, shown in ((HERE / "README.md", report), (REPOSITORY / "README.md", barred)):
        table = "\n".join(markdown(shown))
        text = readme.read_text() if readme.exists() else ""
        if BEGIN in text and END in text:
            head, _, rest = text.partition(BEGIN)
            tail = rest.partition(END)[2]
            readme.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}")
            print(f"wrote the table into {readme.relative_to(REPOSITORY)}")
    return 0


def markdown(report: dict) -> list[str]:
    """The results as a table, with the machine, the date and the versions under it."""
    from harness import Result, table_rows

    headings = ["what", "value", "unit", "against", "ratio", "bar", "holds"]
    rows = table_rows([Result(**each) for each in report["results"]])
    facts = [str(value) for value in report["machine"].values()]
    facts[1] += " cores"
    facts += [f"{name} {number}" for name, number in report["versions"].items()]
    return [
        "| " + " | ".join(headings) + " |",
        "|---|---:|---|---|---:|---|---|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        f"Measured on {report['date']}: {', '.join(facts)}.",
    ]


if __name__ == "__main__":
    sys.exit(main())
