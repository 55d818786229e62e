import json
import logging
import os
import select
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from lmlive.server import logs
from lmlive.server.logs import JsonFormatter, LineWriter, TextFormatter, stderr_number
from tests.conftest import eventually

log = logging.getLogger("lmlive.test-logs")


class Pipe:
    """A pipe that nobody reads until the test does."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def fill(self) -> int:
        """Write until it takes no more."""
        os.set_blocking(self.writer, False)
        count = 0
        try:
            while True:
                count += os.write(self.writer, b"\n" * 4096)
        except BlockingIOError:
            os.set_blocking(self.writer, True)
            return count

    def read(self) -> list[str]:
        """Give the lines that are there."""
        text = b""
        while select.select([self.reader], [], [], 0)[0]:
            text += os.read(self.reader, 65536)
        return text.decode().split("\n")[:-1]

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _own_logger() -> Iterator[None]:
    log.propagate = False
    log.setLevel(logging.INFO)
    yield
    for handler in list(log.handlers):
        log.removeHandler(handler)


def writer(fd: int, most: int = 100) -> LineWriter:
    made = LineWriter(fd, most)
    made.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log.addHandler(made)
    return made


@pytest.mark.may_block
def test_lines_come_in_order_and_all_of_them_before_the_end(pipe: Pipe) -> None:
    made = writer(pipe.writer)
    for number in range(50):
        log.info("line %d", number)
    made.close()
    made.close()
    assert pipe.read() == [f"INFO line {number}" for number in range(50)]


@pytest.mark.may_block
async def test_whoever_logs_to_a_full_pipe_goes_on_and_what_is_lost_is_told(pipe: Pipe) -> None:
    pipe.fill()
    made = writer(pipe.writer, most=3)
    log.info("first")
    await eventually(lambda: not made._lines)  # its thread has it, and stands
    for number in range(10):
        log.info("line %d", number)
    assert made.lost == 7
    await eventually(lambda: "INFO line 2" in pipe.read())
    log.info("last")
    made.close()
    assert pipe.read() == ["WARNING log_lines_lost count=7", "INFO last"]


@pytest.mark.may_block
def test_what_was_lost_is_told_at_the_end_at_the_latest(pipe: Pipe) -> None:
    made = writer(pipe.writer, most=0)
    log.info("one")
    made.close()
    assert made.lost == 1
    assert pipe.read() == []
    queued = writer(pipe.writer, most=1)
    queued._thread = made._thread
    queued.lost = 2
    log.removeHandler(made)
    log.info("two")
    queued.close()
    assert pipe.read()[0] == "WARNING log_lines_lost count=2"


@pytest.mark.may_block
def test_a_pipe_that_stands_still_does_not_hold_up_the_end(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "CLOSE_SECONDS", 0.01)
    pipe.fill()
    made = writer(pipe.writer)
    log.info("kept")
    made.close()
    thread = made._thread
    assert thread is not None
    assert thread.is_alive()
    assert thread.daemon
    log.info("too late")
    while thread.is_alive():
        pipe.read()
        thread.join(0.01)


@pytest.mark.may_block
async def test_a_pipe_that_somebody_made_non_blocking_loses_nothing(pipe: Pipe) -> None:
    pipe.fill()
    os.set_blocking(pipe.writer, False)
    made = writer(pipe.writer)
    log.info("whole")
    await eventually(lambda: not made._lines)
    assert await eventually(lambda: "INFO whole" in pipe.read())
    made.close()


@pytest.mark.may_block
def test_a_closed_stderr_and_none_at_all_harm_nobody(pipe: Pipe) -> None:
    os.close(pipe.reader)
    made = writer(pipe.writer)
    log.info("to nobody")
    made.close()
    pipe.reader = os.open(os.devnull, os.O_RDONLY)
    none = writer(-1)
    log.info("to nowhere")
    assert none._thread is None
    none.close()


@pytest.mark.parametrize("stream", [None, SimpleNamespace(), SimpleNamespace(fileno=lambda: int("x"))])
def test_without_a_stderr_its_number_is_left_alone(stream: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert stderr_number() == -1


@pytest.mark.may_block
def test_a_record_that_cannot_be_written_harms_nobody(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    made = writer(pipe.writer)
    log.info("%d", "no number")
    log.info("\ud800")
    made.close()
    assert pipe.read() == ["INFO \\ud800"]


def record(text: str) -> logging.LogRecord:
    error = ValueError(text)
    return logging.LogRecord(
        "x", logging.ERROR, "", 0, "failed error=%s", (text,), (ValueError, error, error.__traceback__)
    )


@pytest.mark.parametrize("text", ["\x1b[2J", "a\nforged", "\r", "\x9b31m"])
def test_a_strangers_text_neither_moves_the_cursor_nor_begins_a_line(text: str) -> None:
    first, *trace = TextFormatter().format(record(text)).split("\n")
    assert "failed error=" in first
    assert all(line.isprintable() for line in [first, *trace])
    assert trace[0].startswith("ValueError: ")
    assert not any(line.startswith("forged ") for line in trace)
    line = JsonFormatter().format(record(text))
    assert line.isprintable()
    assert json.loads(line)["event"] == f"failed error={text}"
