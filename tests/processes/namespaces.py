"""Pid namespaces of their own for a test's processes, as containers have."""

import subprocess
from functools import cache
from pathlib import Path

import pytest

NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@cache
def why_no_namespaces() -> str:
    """Say why no pid namespace can be made here; nothing if one can."""
    try:
        done = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, timeout=10, check=False)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


def only_child(pid: int) -> int:
    """Give the process that a command such as ``unshare`` started."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def need_namespaces() -> None:
    """Skip the test where none can be made."""
    if reason := why_no_namespaces():
        pytest.skip(f"no pid namespace can be made here: {reason}")
