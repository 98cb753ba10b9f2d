"""How long planning takes for jobs of 1,856 and 16,384 ranks, simulated in one process."""

from __future__ import annotations

from harness import Context, Result, run_question


def plan(_context: Context) -> list[Result]:
    """Nothing yet."""
    return []


if __name__ == "__main__":
    run_question({"simulated": (1, plan)})
