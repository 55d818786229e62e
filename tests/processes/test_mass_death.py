"""Many processes that die at once: each is reaped once, and nothing of them is left.

``LMLIVE_TEST_DEATHS=1000`` makes them a thousand.
"""

import importlib.util
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lmlive.protocol.verbs import Verb

DEATHS = int(os.environ.get("LMLIVE_TEST_DEATHS", "200"))
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
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_many_light_processes_killed_at_once() -> None:
    module = light()
    with (
        module.light_server() as url,
        module.LightWorkers(url, DEATHS) as workers,
        module.Connection(url) as connection,
    ):
        pid = connection.ask(Verb.STATUS, [])["server"]["pid"]
        *victims, survivor = workers.all
        for worker in workers.all:
            connection.register(worker)
        connection.events()  # the first long reply makes libzmq's binding a thread, with descriptors, for good
        held = descriptors(pid)
        for worker in victims:
            workers.kill(worker)
        workers.exits(len(victims))
        connection.reaps(len(victims), 30.0)
        events = connection.events()
        reaped = Counter(event["instance_id"] for event in events if event["kind"] == "reaped")
        assert reaped == Counter(str(worker.instance_id) for worker in victims)
        assert {event["reason"] for event in events if event["kind"] == "reaped"} == {"exit"}
        status = connection.ask(Verb.STATUS, [])
        assert [one["instance_id"] for one in status["instances"]] == [str(survivor.instance_id)]
        assert status["liveness"]["reaps"]["exit"] == len(victims)
        assert (status["releases"]["pending"], status["releases"]["stuck"]) == (0, 0)
        left = held - 2 * len(victims)  # of each the tether and the process
        for _ in range(1000):
            if descriptors(pid) <= left:
                break
            connection.ask(Verb.STATUS, [])  # closing is off the loop, and takes its time
        assert descriptors(pid) <= left
