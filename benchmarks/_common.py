"""What every benchmark shares: one row per figure, with its goal beside it.

python benchmarks/scan_cost.py           # a table
python benchmarks/scan_cost.py --json    # one JSON object
"""

import argparse
import json
import platform
from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """One figure.

    Args:
        name: What was measured.
        result: The figure; None where it could not be measured here.
        unit: Of result and goal.
        goal: What it should be; None for a figure that is only for comparison.
        at_least: Whether more is better; otherwise less is.
        note: How it was measured, or why not.
    """

    name: str
    result: float | None
    unit: str
    goal: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None where there is none, or no figure."""
        if self.goal is None or self.result is None:
            return None
        return self.result >= self.goal if self.at_least else self.result <= self.goal


def arguments(question: str) -> argparse.ArgumentParser:
    """Give a parser that knows ``--json``; a benchmark adds its own flags.

    Args:
        question: The one question that the benchmark answers.
    """
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def report(rows: Sequence[Row], as_json: bool) -> None:
    """Print the figures."""
    if as_json:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "kernel": platform.release()}
        figures = [row._asdict() | {"reached": row.reached} for row in rows]
        print(json.dumps({"machine": machine, "rows": figures}, indent=2))
        return
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        print(f"{row.name:<{width}}  {_figure(row.result):>12} {row.unit:<8}  {_verdict(row)}  {row.note}".rstrip())


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _verdict(row: Row) -> str:
    if row.goal is None:
        return ""
    bound = "at least" if row.at_least else "at most"
    verdict = {True: "reached", False: "MISSED", None: "not measured"}[row.reached]
    return f"goal {bound} {_figure(row.goal)} {row.unit}: {verdict}"
