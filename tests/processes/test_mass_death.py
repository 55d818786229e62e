"""Many processes that die at once: each is reaped once, and nothing of them is left.

``LMLIVE_TEST_DEATHS=1000`` makes them a thousand.
"""

import contextlib
import importlib.util
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lmlive.protocol.verbs import Verb
from tests.server.raw import BLOCK_BYTES, register

DEATHS = int(os.environ.get("LMLIVE_TEST_DEATHS", "200"))
BLOCKS = 4
LIGHT = Path(__file__).parents[2] / "benchmarks" / "_light.py"

pytestmark = [pytest.mark.timeout(120), pytest.mark.may_block]


def light() -> Any:
    """Give the module of the benchmarks that starts processes which hold a tether and do nothing."""
    spec = importlib.util.spec_from_file_location("light", LIGHT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def descriptors(pid: int) -> int:
    """Count what a process has open, but for what threads wake each other by: the first long reply starts some."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(entry.readlink()))
    return sum("[eventfd]" not in target and "[eventpoll]" not in target for target in found)


def segments(pid: int) -> int:
    """Count the workers' memory that a process maps."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:lmlive-light")


@pytest.mark.parametrize("memory", [0, BLOCKS * BLOCK_BYTES], ids=["bare", "memory"])
def test_many_light_processes_killed_at_once(memory: int) -> None:
    module = light()
    with (
        module.light_server() as url,
        module.LightWorkers(url, DEATHS, memory) as workers,
        module.Connection(url) as connection,
    ):
        pid = connection.ask(Verb.STATUS, [])["server"]["pid"]
        *victims, survivor = workers.all
        for worker in workers.all:
            if memory:
                connection.ask(Verb.REGISTER, register(BLOCKS, worker.secret), instance_id=worker.instance_id)
            else:
                connection.register(worker)
        held = descriptors(pid)
        assert segments(pid) == (DEATHS if memory else 0)
        for worker in victims:
            workers.kill(worker)
        workers.exits(len(victims))
        connection.reaps(len(victims), 30.0)
        events = connection.events()
        reaped = Counter(event["instance_id"] for event in events if event["kind"] == "reaped")
        assert reaped == Counter(str(worker.instance_id) for worker in victims)
        assert {event["reason"] for event in events if event["kind"] == "reaped"} == {"exit"}
        left = held - 2 * len(victims)  # of each the tether and the process
        for _ in range(1000):
            status = connection.ask(Verb.STATUS, [])  # closing is off the loop, and takes its time
            if descriptors(pid) <= left and not status["releases"]["pending"]:
                break
        assert descriptors(pid) <= left
        assert segments(pid) == (1 if memory else 0)
        assert status["releases"] == {"pending": 0, "done": len(victims), "by_exit": 0, "stuck": 0}
        assert [one["instance_id"] for one in status["instances"]] == [str(survivor.instance_id)]
        assert status["liveness"]["reaps"]["exit"] == len(victims)
        assert [one["state"] for one in status["instances"]] == ["active"]
