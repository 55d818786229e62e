import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lmlive.config import ServerConfig
from lmlive.errors import StartError
from lmlive.modules.events import note
from lmlive.server import __main__ as entry
from lmlive.server import logs


@pytest.fixture(autouse=True)
def _own_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "configure", lambda form, level: None)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--bogus"], ["--bogus"]),
        (["--pool-bytes", "lots"], ["--pool-bytes", "lots"]),
        (["--device", "cuda"], ["--device", "cuda", "not in this build"]),
        (["--worker-reap-timeout-seconds", "5"], ["--worker-reap-timeout-seconds", "5", "30"]),
        (["--tier", "s3://x"], ["--tier", "s3://x", "file:///", "valkey://"]),
    ],
)
def test_bad_flags_exit_2_with_flag_value_and_rule(
    flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.main(flags) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    for word in words:
        assert word in printed.err


def test_http_without_its_extra_exits_2_and_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "aiohttp" else real(name, *more)
    )
    assert entry.main(["--http", "127.0.0.1:0"]) == 2
    assert "pip install 'lmlive[ops]'" in capsys.readouterr().err


def server() -> Any:
    return SimpleNamespace(urls=("ipc:///a", "tcp://127.0.0.1:5"), http_url=None, epoch=255)


class Served:
    """A server that ends as a test says."""

    urls = ("ipc:///a",)
    http_url = None
    epoch = 1
    drained = True
    fails: Exception | None = None

    def __init__(self, config: object) -> None:
        self.closed = asyncio.Event()
        self.terminated = asyncio.Event()

    async def start(self) -> None:
        if self.fails is not None:
            os.kill(os.getpid(), signal.SIGTERM)
            await self.closed.wait()
            raise self.fails

    async def serve_forever(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await self.closed.wait()
        assert not self.terminated.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        await self.terminated.wait()

    def close(self) -> None:
        self.closed.set()

    def terminate(self) -> None:
        self.terminated.set()


@pytest.mark.parametrize(("drained", "status"), [(True, 0), (False, 3)])
async def test_one_signal_drains_and_a_second_one_terminates(
    drained: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Served, "drained", drained)
    monkeypatch.setattr(entry, "LivenessServer", Served)
    assert await entry.serve(ServerConfig(environ={})) == status
    assert capsys.readouterr().out.startswith("lmlive ready ")


async def test_a_signal_while_it_starts_is_a_clean_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Served, "fails", StartError("closed"))
    monkeypatch.setattr(entry, "LivenessServer", Served)
    assert await entry.serve(ServerConfig(environ={})) == 0


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_ready_line(capsys: pytest.CaptureFixture[str]) -> None:
    entry.announce(server())
    words = capsys.readouterr().out.split()
    assert words[:4] == ["lmlive", "ready", "bind=ipc:///a,tcp://127.0.0.1:5", "http=off"]
    assert [word.partition("=")[0] for word in words[4:]] == ["pid", "epoch", "version"]
    assert words[5] == "epoch=00000000000000ff"


def test_a_closed_stdout_does_not_stop_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    entry.announce(server())
    assert "ready line lost" in caplog.text


def test_a_full_stdout_does_not_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    full = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            full += os.write(write, bytes(4096))
    os.set_blocking(write, True)
    with os.fdopen(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        entry.announce(server())
        while full:
            full -= len(os.read(read, min(full, 65_536)))
        assert os.read(read, 200).startswith(b"lmlive ready ")
        monkeypatch.undo()
    os.close(read)


def test_an_end_that_hangs_ends_the_process_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    statuses: list[int] = []

    def exit_with(status: int) -> None:
        statuses.append(status)
        ended.set()

    monkeypatch.setattr(os, "_exit", exit_with)
    with entry.LastResort() as last_resort:
        last_resort.wait(1000.0)
        last_resort.wait(0.0)
        assert ended.wait(10.0)
    assert statuses == [3]


def test_the_descriptor_limit_goes_up_to_what_is_allowed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        entry.raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


WITHOUT_STANDARD_DESCRIPTORS = """
import os, sys
from lmlive.server.__main__ import open_standard_descriptors
log = os.dup(1)
for number in {closed}:
    os.close(number)
open_standard_descriptors()
os.write(log, b" ".join(os.readlink(f"/proc/self/fd/{{number}}").encode() for number in {closed}))
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2), (1, 2), ()])
def test_closed_standard_descriptors_are_opened_on_nothing(closed: tuple[int, ...]) -> None:
    text = WITHOUT_STANDARD_DESCRIPTORS.format(closed=closed)
    done = subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, timeout=15)
    assert done.stdout.decode().split() == ["/dev/null"] * len(closed)


def record(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    log = logging.getLogger("lmlive.server")
    try:
        int("oops")
    except ValueError:
        log.exception("failed n=%d", 3)
    note(log, logging.WARNING, "reaped", {"instance_id": "7", "reason": "exit", "pid": None})
    return caplog.records[-1]


def test_a_line_of_text_is_event_and_facts(caplog: pytest.LogCaptureFixture) -> None:
    line = logs.TextFormatter().format(record(caplog))
    time, rest = line.split(" ", 1)
    assert time.endswith("Z")
    assert rest == "WARNING reaped instance_id=7 reason=exit"


def test_a_line_of_json_has_the_facts_as_fields(caplog: pytest.LogCaptureFixture) -> None:
    line = json.loads(logs.JsonFormatter().format(record(caplog)))
    assert line | {"time": ""} == {
        "time": "",
        "level": "WARNING",
        "logger": "lmlive.server",
        "event": "reaped",
        "instance_id": "7",
        "reason": "exit",
        "pid": None,
    }
    failed = json.loads(logs.JsonFormatter().format(caplog.records[-2]))
    assert failed["event"] == "failed n=3"
    assert "ValueError: invalid literal" in failed["exception"]
