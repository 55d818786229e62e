"""The guards bite: what a test leaves behind is named."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LEAKY = Path(__file__).with_name("leaks_on_purpose.py")
SAID = {
    "test_leaks_fd": "fds: [0-9]+ -> /dev/null",
    "test_leaks_thread": r"threads: lmlive-release-0 \(daemon\)",
    "test_leaks_child": "children: process [0-9]+ .*time.sleep",
    "test_leaks_memfd": "memfds: .*/memfd:left",
    "test_leaks_shm": "shm: lmlive-test-",
    "test_leaks_task": "task <Task pending .*sleep",
    "test_leaks_exception": "unhandled on the loop: .*ZeroDivisionError",
    "test_fails_blocking": "Blocking call to time.sleep",
    "test_fails_warning": "DeprecationWarning: deprecated",
    "test_fails_waiting": "did not hold within 0.01 s: test_fails_waiting",
}


@pytest.mark.timeout(60)
def test_a_leak_of_each_kind_is_caught_and_named() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "--tb=short", str(LEAKY)],
        cwd=LEAKY.parents[1],
        env={**os.environ, "LMLIVE_CHUNK_TOKENS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    tests = set(re.findall(r"^(?:async )?def (test_\w+)", LEAKY.read_text(), re.MULTILINE))
    assert tests >= SAID.keys()
    outcomes = dict(re.findall(r"^(?:ERROR|FAILED) \S*::(test_\w+)( )", run.stdout, re.MULTILINE))
    assert outcomes.keys() == SAID.keys(), run.stdout
    for name, said in SAID.items():
        assert re.search(said, run.stdout), f"{name} is not told by {said}:\n{run.stdout}"
    assert all(name.startswith("test_passes") for name in tests - outcomes.keys())
