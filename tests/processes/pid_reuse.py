"""Scenes in a pid namespace of their own, where a number can be given again: run as its first process, by a test.

The first argument is the way to the process's descriptor that is left, as in ``tests.server.test_evidence``; the second
names the scene.
"""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

from lmlive.liveness.evidence import Evidence
from lmlive.modules.management import hash_secret
from lmlive.server import evidence
from lmlive.server.exits import start_time
from tests.conftest import eventually
from tests.modules.registry import BARE, OTHER, SECRET
from tests.server.tethered import WORKER, House, offer

NUMBER = 500
SLEEPER = "import time; time.sleep(60)"


def spawn(text: str) -> subprocess.Popen[bytes]:
    """Start a process that has the number."""
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(NUMBER - 1))
    process = subprocess.Popen([sys.executable, "-S", "-E", "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.pid == NUMBER, process.pid
    return process


def tethered(house: House, packet: bytes) -> str:
    return WORKER.format(address=str(house.path), packet=packet, before="", then="")


async def ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill it and wait for it, so that its number is free."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


async def the_number_of_a_dead_worker_is_anothers(house: House) -> None:
    dead = spawn(tethered(house, offer()))
    await ready(dead)
    house.registry.register(**BARE)
    live = house.books.roster.get(7)
    assert live is not None
    assert (live.evidence, live.pid) == (Evidence.PROCESS, NUMBER)
    end(dead)  # the loop has not seen it yet, and the number is given again
    other = spawn(tethered(house, offer(secret=OTHER, instance_id=8)))
    await ready(other)
    await eventually(lambda: house.books.roster.get(7) is None)
    event = house.books.events.after(0, 100)[-1]
    assert (event["reason"], event["pid"], event["exit_status"]) == ("exit", NUMBER, None)
    house.registry.register(8, **BARE, secret=OTHER)
    successor = house.books.roster.get(8)
    assert successor is not None
    assert (successor.evidence, successor.pid) == (Evidence.PROCESS, NUMBER)
    for _ in range(100):
        await asyncio.sleep(0)
    assert house.books.roster.get(8) is successor
    end(other)
    await eventually(lambda: house.books.roster.tracked == 0)


async def the_number_is_given_again_before_the_offer_is_read(house: House) -> None:
    waits = "end.recv(1000)\nos.read(0, 1)\nend.send(PACKET)\nprint('sent', flush=True)\n"
    dead = spawn(tethered(house, offer()).replace("end.recv(1000)\nend.send(PACKET)\n", waits))
    await eventually(lambda: house.tethers.connections == 1)
    assert dead.stdin is not None
    assert dead.stdout is not None
    # From here on the loop stands still: the offer comes, its sender ends, another process gets the number.
    dead.stdin.write(b"x")
    dead.stdin.flush()
    assert dead.stdout.readline() == b"sent\n"
    started = start_time(NUMBER)
    end(dead)
    other = spawn(SLEEPER)
    while start_time(NUMBER) == started:  # two starts within one tick of the kernel's clock look like one
        end(other)
        other = spawn(SLEEPER)
    await eventually(lambda: house.tethers.connections == 0)
    record = house.record()
    if record is None:  # newer kernels name the one who is gone, whose exit was told at once
        assert house.books.roster.secret_ended(hash_secret(SECRET))
        end(other)
        return
    assert (record.evidence, record.pid) == (Evidence.NONE, NUMBER)
    house.registry.register(**BARE)
    end(other)
    for _ in range(100):
        await asyncio.sleep(0)
    assert house.books.roster.tracked == 1  # it was no business of the other one's


SCENES = {
    "dead": the_number_of_a_dead_worker_is_anothers,
    "unread": the_number_is_given_again_before_the_offer_is_read,
}


async def main(way: str, scene: str) -> None:
    if way != "SCM_PIDFD":
        evidence.SO_PASSPIDFD = 9999  # type: ignore[misc]
    if way == "SO_PEERCRED":
        evidence.SO_PEERPIDFD = 9999  # type: ignore[misc]
    with tempfile.TemporaryDirectory(prefix="lm-", dir="/tmp") as run_dir:
        house = await House(Path(run_dir)).open()
        await SCENES[scene](house)
        await house.close()
    sys.stdout.write("done\n")


if __name__ == "__main__":
    try:
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(NUMBER - 1))
    except OSError as error:
        sys.exit(f"the next number cannot be chosen here: {error}")
    asyncio.run(main(*sys.argv[1:]))
