import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_bench_runs_every_benchmark_and_none_of_their_parts() -> None:
    pattern = re.search(r"for benchmark in (\S+);", (ROOT / "Makefile").read_text())
    assert pattern is not None
    run = set(ROOT.glob(pattern[1]))
    assert run
    for path in (ROOT / "benchmarks").glob("*.py"):
        whole = not path.name.startswith("_")  # a part may be a program too, for another process of its benchmark
        assert (path in run) == whole, path.name
        assert not whole or '__name__ == "__main__"' in path.read_text(), path.name
