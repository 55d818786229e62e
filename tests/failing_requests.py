"""Requests that fail, thousands of each kind: each gets one typed error, and afterwards both sides are as before.

``python -m tests.failing_requests --count 10000`` sends so many of every kind and prints one JSON document: for each
kind its errors, what it left behind on either side, and by how much the memory of both processes grew. The server is a
process of its own; this one is the worker's side, with the library's own connections.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

from lmlive.protocol.codec import encode_request
from lmlive.worker import link as link_module
from tests.failing_requests_kinds import Kind, Side, the_stage
from tests.fuzz.subject import Subject, rss_kib

GROWTH_KIB: Final = 1024
"""By how much a process may grow, or by a hundredth if that is more."""


async def send_all(kind: Kind, count: int) -> Counter[str]:
    """Send so many, some at a time, and count how they ended."""
    ended: Counter[str] = Counter()
    numbers = iter(range(count))

    async def some() -> None:
        for _ in numbers:
            ended[await kind.ask()] += 1

    with spoilt(kind):
        await asyncio.gather(*[some() for _ in range(min(kind.at_once, count))])
    return ended


@contextlib.contextmanager
def spoilt(kind: Kind) -> Iterator[None]:
    """Let the library's connections send what the kind makes of their frames."""
    spoil = kind.spoil
    if spoil is None:
        yield
        return

    def encode(*args: Any, **header: Any) -> bytes:
        return spoil(encode_request(*args, **header))

    with mock.patch.object(link_module, "encode_request", encode):
        yield


async def run_kind(
    side: Side, kind: Kind, count: int, warm_up: int, fill: Callable[[], Awaitable[None]]
) -> dict[str, Any]:
    """Run one kind, and compare both sides with what they were before it."""
    subject = side.subject
    for word in kind.before:
        await (fill() if word == "fill" else subject.ask(word))
    await send_all(kind, warm_up)
    before, mine_before, rss_before = await settled(side, kind)
    began = time.monotonic()
    ended = await send_all(kind, count)
    seconds = time.monotonic() - began
    after, mine_after, rss_after = await settled(side, kind)
    for word in kind.after:
        await subject.ask(word)
    grown = {name: after[name] - before[name] for name in before if name not in COUNTERS}
    mine_grown = {name: mine_after[name] - mine_before[name] for name in mine_before if name not in COUNTERS}
    left = (
        {name: mine_after[name] for name in ("pending", "outbox", "late") if mine_after[name]} if not kind.after else {}
    )
    extra = mine_after["late_replies"] - mine_before["late_replies"] - (ended[kind.expected] if kind.late else 0)
    rss = [now - then for now, then in zip(rss_after, rss_before, strict=True)]
    return {
        "kind": kind.name,
        "expected": kind.expected,
        "ended": dict(ended),
        "server_grown": {name: by for name, by in grown.items() if by},
        "worker_grown": {name: by for name, by in mine_grown.items() if by},
        "worker_left": left,
        "replies_too_many": extra,
        "dropped": after["dropped"] - before["dropped"],
        "server_rss_kib": [rss_before[0], rss[0]],
        "worker_rss_kib": [rss_before[1], rss[1]],
        "per_second": round(count / seconds),
        "ok": (
            (set(ended) <= {kind.expected, "ok"} if kind.late else set(ended) == {kind.expected})
            and ended.total() == count
            and not any(grown.values())
            and not any(mine_grown.values())
            and not left
            and not extra
            and all(by <= max(GROWTH_KIB, was // 100) for by, was in zip(rss, rss_before, strict=True))
        ),
    }


COUNTERS: Final = (
    *(
        "late_replies",
        "bad_frames",
        "errors",
        "internal_errors",
        "broken_rules",
        "rss_kib",
        "dropped",
        "handshake_failures",
    ),
)
"""What only grows."""


async def settled(side: Side, kind: Kind) -> tuple[dict[str, int], dict[str, int], list[int]]:
    """Count both sides once nothing is on its way, and read their memory."""

    def under_way() -> bool:
        late = kind.late and any(len(link._late) for link in side.links)  # their answers are still to come
        return late or (not kind.after and side.counts()["pending"] > 0)  # a beat of the library's worker

    for _ in range(1000):
        if not under_way():
            break
        await asyncio.sleep(0.01)
    counts = await (side.subject.counts() if kind.name == "busy" else side.subject.still())
    gc.collect()
    return counts, side.counts(), [counts["rss_kib"], rss_kib(os.getpid())]


async def run_all(run_dir: Path, count: int, only: str = "") -> list[dict[str, Any]]:
    """Run every kind, one after the other."""
    found = []
    gc.collect()
    gc.freeze()  # what was there before is not looked at again and again
    async with Subject(run_dir, max_in_flight=64, goes_wrong=True) as subject, the_stage(subject) as (side, all_kinds):
        busy = next(kind for kind in all_kinds if kind.name == "busy")
        held: list[asyncio.Future[str]] = []

        async def fill() -> None:
            held.extend(asyncio.ensure_future(busy.ask()) for _ in range(64))
            while (await subject.counts())["outstanding"] < 64:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.01)

        for kind in all_kinds:
            if only in kind.name:
                found.append(await run_kind(side, kind, count, max(200, count // 2), fill))
                if kind is busy:
                    assert {await one for one in held} == {"ServerDraining"}
        await subject.still()
    gc.unfreeze()
    return found


def main() -> int:
    """Run it as a command."""
    parser = argparse.ArgumentParser(description="Send failing requests of each kind, and look at what they leave.")
    parser.add_argument("--count", type=int, default=10_000, help="requests of each kind (10000)")
    parser.add_argument("--only", default="", help="kinds whose name has this")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lmlive-") as run_dir:
        found = asyncio.run(run_all(Path(run_dir), options.count, options.only))
    sys.stdout.write(json.dumps({"count": options.count, "kinds": found}, indent=1) + "\n")
    return 0 if found and all(kind["ok"] for kind in found) else 1


if __name__ == "__main__":
    sys.exit(main())
