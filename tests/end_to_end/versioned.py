"""A server in a process of its own that speaks other versions than this build: ``versioned LEAST MOST FLAGS...``."""

import os
import runpy
import sys
from pathlib import Path

from lmlive.protocol import versions
from lmlive.testing import ServerProcess

ROOT = str(Path(__file__).parents[2])


def server(run_dir: Path, spoken: tuple[int, int]) -> ServerProcess:
    """Give a server that speaks these versions, not started yet."""
    process = ServerProcess(run_dir=run_dir, environ={"PYTHONPATH": ROOT, **os.environ})
    flags = ["--run-dir", str(run_dir), "--pool-bytes", "4MiB", "--chunk-tokens", "64"]
    least, most = map(str, spoken)
    process.arguments = (sys.executable, "-m", "tests.end_to_end.versioned", least, most, *flags)
    return process


if __name__ == "__main__":
    versions.SPOKEN = versions.Versions(int(sys.argv[1]), int(sys.argv[2]))
    del sys.argv[1:3]
    runpy.run_module("lmlive.server", run_name="__main__", alter_sys=True)
