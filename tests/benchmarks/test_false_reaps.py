"""The simulation of false reaps: the same from the same seed, and the rules in the order that theory says."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "false_reaps.py"


def figures(*flags: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, SCRIPT, "--json", *flags], capture_output=True, text=True, check=True)
    return {row["name"]: row["result"] for row in json.loads(done.stdout)["rows"]}


def test_a_seed_says_it_all_and_patience_pays() -> None:
    first, again = (figures("--days", "64", "--deaths", "32", "--seed", "3") for _ in range(2))
    assert first == again
    by_patience = [first[f"fixed {seconds} s: false reaps"] for seconds in (30, 40, 60, 120)]
    assert by_patience == sorted(by_patience, reverse=True)
    assert by_patience[0] > 0
    assert first["lmlive, 120 s of watched time: false reaps"] <= by_patience[-1]
    assert 110 <= first["lmlive, 120 s of watched time: detection, p50"] <= 150


def test_a_long_gap_ends_in_a_false_reap_unless_the_process_is_shown_alive(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    # A beat of 0.1 s, which is stretched to 10 s: the gap is of 150 s then.
    times = [0.1 * beat + (1.4 if beat > 50 else 0.0) for beat in range(100)]
    trace.write_text(
        "# seq send recv\n" + "".join(f"{beat} {at:.3f} {at + 0.01:.3f}\n" for beat, at in enumerate(times))
    )
    found = figures("--trace", str(trace), "--deaths", "4")
    reaped = {name for name, result in found.items() if name.endswith("false reaps") and result > 0}
    assert "fixed 120 s: false reaps" in reaped
    assert "lmlive, 120 s of watched time: false reaps" in reaped
    assert "the same, process shown alive: false reaps" not in reaped


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("# nothing\n")
    done = subprocess.run([sys.executable, SCRIPT, "--trace", path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no two lines" in done.stderr
