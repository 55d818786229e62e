"""Run the whole demo: ``python -m examples.demo``; exit status 0 only if every check held."""

import asyncio
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from examples.demo.processes import EngineProcess, maps_inode
from lmlive.clock import MonotonicClock
from lmlive.protocol.messages import Events
from lmlive.protocol.verbs import Verb
from lmlive.server.asker import Asker
from lmlive.testing import ServerProcess

BIG_CACHE_BYTES = 512 << 20
TRIES = 5


class Timeline:
    """Prints what happens when, and remembers which checks failed."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self.failed: list[str] = []

    def say(self, who: str, what: str) -> None:
        """Print one line of the timeline."""
        print(f"{time.monotonic() - self._begin:8.2f} s  {who:<8} {what}", flush=True)

    def check(self, holds: bool, what: str) -> None:
        """Print whether something that must hold does."""
        if not holds:
            self.failed.append(what)
        self.say("check", f"{'ok  ' if holds else 'FAIL'} {what}")


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> bool:
    """Wait until a condition holds; False if it does not within the time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if await condition():
            return True
        await asyncio.sleep(0.01)
    return False


def words(facts: Mapping[str, object]) -> str:
    """Give facts as ``key=value`` words, without those that are unknown."""
    return " ".join(f"{key}={value}" for key, value in facts.items() if value is not None)


def read_status(http: str) -> dict[str, Any]:
    """Ask the server's ``/status``."""
    with urllib.request.urlopen(f"{http}/status", timeout=5.0) as reply:  # noqa: S310 - our own loopback server
        status: dict[str, Any] = json.load(reply)
        return status


def read_events(url: str) -> list[dict[str, Any]]:
    """Ask the server for its events."""
    with Asker(url, MonotonicClock()) as asker:
        asker.hello(5.0)
        answer = asker.ask(Verb.EVENTS, Events(0, 1_000).to_payload(), 5.0)
    events: Any = answer.payload[0]
    return list(events)


async def share_a_prefix(timeline: Timeline, url: str) -> tuple[EngineProcess, EngineProcess]:
    """Engine A stores a prompt's prefix, engine B loads it; B's output must be that of a run without lmlive."""
    a, b = await asyncio.gather(EngineProcess.start("engine A", url), EngineProcess.start("engine B", url))
    for name, engine in (("A", a), ("B", b)):
        timeline.say(name, f"registered {words(json.loads(engine.first_line))}")

    stored = await a.ask("generate")
    timeline.say(
        "A", f"prefilled {stored['forwarded_prompt_tokens']} tokens, first token after "
        f"{stored['first_token_ms']:.0f} ms, stored {stored['stored']} tokens ({stored['stored'] // 256} chunks)",
    )  # fmt: skip
    timeline.check(stored["stored"] == 2_048, "A stored 8 chunks, 2,048 tokens")

    loaded = await b.ask("generate")
    timeline.say(
        "B", f"loaded {loaded['loaded']} tokens, computed {loaded['forwarded_prompt_tokens']}, first token after "
        f"{loaded['first_token_ms']:.0f} ms",
    )  # fmt: skip
    timeline.check(loaded["loaded"] == 2_048, "B retrieved 2,048 tokens")
    timeline.check(loaded["forwarded_prompt_tokens"] == 52, "B's model saw 52 prompt tokens, not 2,100")

    reference = await b.ask("generate", use_lmlive=False)
    timeline.say("B", f"reference without lmlive: first token after {reference['first_token_ms']:.0f} ms")
    timeline.check(loaded["tokens"] == reference["tokens"], f"B's output equals the reference: {loaded['tokens'][:6]}…")

    await a.ask("generate", salt="flipped", flip=True)
    flipped = await b.ask("generate", salt="flipped")
    timeline.check(flipped["loaded"] == 2_048, "B retrieved the copy with one flipped block")
    timeline.check(flipped["tokens"] != reference["tokens"], f"the flipped block changes it: {flipped['tokens'][:6]}…")
    return a, b


async def kill_in_store(timeline: Timeline, server: ServerProcess, a: EngineProcess) -> None:
    """Engine A dies by SIGKILL in the middle of a STORE of a second cache; everything it held must come back."""
    url, http = server.url, server.ready["http"]
    for attempt in range(1, TRIES + 1):
        engine = a if attempt == 1 else await EngineProcess.start("engine A", url)
        second = await engine.ask("store_and_die", status_url=f"{http}/status", cache_bytes=BIG_CACHE_BYTES)
        timeline.say("A", f"registered a second cache of {second['bytes'] >> 20} MiB and stores it")
        mapped = maps_inode(server.pid, second["inode"])
        status = await engine.exit_status()
        died = time.monotonic()
        timeline.say("A", f"pid {second['pid']} ended by signal {-status} while its STORE was in flight")

        async def gone(instance_id: str = second["instance_id"]) -> bool:
            return all(row["instance_id"] != instance_id for row in read_status(http)["instances"])

        released = await until(gone)
        seen = [event for event in read_events(url) if event.get("instance_id") == second["instance_id"]]
        report_death(timeline, seen, died)
        aborted = any(event["kind"] == "store_aborted" for event in seen)
        timeline.check(mapped, "while A lived, /proc/<server>/maps named A's memory")
        timeline.check(released, "everything of A was released")
        timeline.check(not maps_inode(server.pid, second["inode"]), "/proc/<server>/maps no longer names A's memory")
        if aborted:
            timeline.check(True, f"the STORE of the dead engine was aborted (try {attempt})")
            return
        timeline.say("demo", "the STORE ended before the kill, trying again")
    timeline.check(False, f"the STORE of the dead engine was aborted ({TRIES} tries)")


def report_death(timeline: Timeline, events: list[dict[str, Any]], died: float) -> None:
    """Print what the server's events say about the dead engine."""
    for event in events:
        if event["kind"] in ("reaped", "released", "store_aborted"):
            facts = words({key: event[key] for key in event if key not in ("kind", "seq", "at", "instance_id")})
            milliseconds = (event["at"] - died) * 1e3
            early = " (before the parent saw the exit)" if milliseconds < 0 else ""
            timeline.say("server", f"{event['kind']:<13} {milliseconds:+.1f} ms from A's exit{early} {facts}")


async def lose_the_server(timeline: Timeline, server: ServerProcess, b: EngineProcess) -> None:
    """Engine B goes on after A's death; then the server dies by SIGKILL."""
    before = await b.ask("generate")
    timeline.check(before["loaded"] == 2_048, "B goes on after A's death")
    server.kill()
    await server.wait()
    timeline.say("server", f"pid {server.pid} killed")


async def find_the_new_server(timeline: Timeline, server: ServerProcess, b: EngineProcess) -> None:
    """A new server runs at the same place; B must come back by itself."""
    announce(timeline, server)

    async def back() -> bool:
        state = await b.ask("state")
        return bool(state["healthy"] and state["generation"])

    timeline.check(await until(back), "B registered again by itself")
    again = await b.ask("generate")
    timeline.check(again["loaded"] == 0 and again["stored"] == 2_048, "B computed and stored again on the new server")
    hit = await b.ask("generate")
    timeline.check(hit["loaded"] == 2_048 and hit["tokens"] == again["tokens"], "and loads it again, same output")
    timeline.check(await b.stop() == 0, "B ended cleanly")
    server.terminate()
    timeline.check(await server.wait() == 0, "the server drained and ended with status 0")


def announce(timeline: Timeline, server: ServerProcess) -> None:
    """Print what the server said when it was ready."""
    timeline.say("server", f"ready {words(server.ready)}")


async def run(timeline: Timeline, run_dir: Path, engines: list[EngineProcess]) -> None:
    """Run all parts; the engines started are noted in ``engines``."""
    flags = ("--http", "127.0.0.1:0", "--pool-bytes", "1GiB")
    async with ServerProcess(*flags, run_dir=run_dir) as server:
        announce(timeline, server)
        a, b = await share_a_prefix(timeline, server.url)
        engines += [a, b]
        await kill_in_store(timeline, server, a)
        await lose_the_server(timeline, server, b)
    async with ServerProcess(*flags, run_dir=run_dir) as server:
        await find_the_new_server(timeline, server, b)


async def main() -> int:
    """Run the demo and give its exit status."""
    timeline = Timeline()
    engines: list[EngineProcess] = []
    with tempfile.TemporaryDirectory(prefix="lmlive-demo-") as folder:
        try:
            await run(timeline, Path(folder) / "run", engines)
        except Exception as error:  # noqa: BLE001 - whatever broke, say it and fail
            timeline.check(False, f"the demo ran to its end ({type(error).__name__}: {error})")
        finally:
            for engine in engines:
                await engine.kill()
    for what in timeline.failed:
        print(f"did not hold: {what}")
    print("all of it held" if not timeline.failed else f"{len(timeline.failed)} checks failed")
    return 1 if timeline.failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
