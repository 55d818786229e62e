"""``python -m lmlive.server``: one server as a process.

It reads flags, environment and file, sets up what belongs to a process (logging, signals, limits, the loop), prints
the ready line and serves. Exit codes: 0 clean, 1 failed start, 2 bad flags, 3 work was cut off at the drain's deadline.

SIGTERM or SIGINT drains, a second one terminates. Whatever hangs then, in a library or in the kernel, does not keep the
process: it ends soon after its patience.
"""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Self, TextIO

from lmlive._version import __version__
from lmlive.config import ServerConfig
from lmlive.errors import ConfigError, LMLiveError
from lmlive.server import logs
from lmlive.server.assembly import check_extras
from lmlive.server.curve import door_keys
from lmlive.server.server import LivenessServer

CLEAN, FAILED, BAD_FLAGS, CUT_OFF = 0, 1, 2, 3

SWITCH_SECONDS = 0.0005
"""How long a busy thread keeps the interpreter while the loop waits for it."""

LAST_SECONDS = 10.0
"""How long the end may take when nothing is waited for any more, before the process is ended as it stands."""

log = logging.getLogger("lmlive.server")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a server until a signal ends it, and give the exit code."""
    open_standard_descriptors()
    logs.configure("text", "WARNING")  # until the settings are known, which may have to be warned of
    warnings: list[str] = []
    try:
        config = ServerConfig.from_args(sys.argv[1:] if argv is None else argv, warn=warnings.append)
        check_extras(config)
        door_keys(config)
    except ConfigError as error:
        for text in warnings:  # one of them may be why it is refused
            log.warning("%s", text)
        print(f"lmlive: {error}", file=sys.stderr)  # noqa: T201 - usage belongs on stderr, logged or not
        return BAD_FLAGS
    logs.configure(config.log_format, config.log_level)
    for text in warnings:
        log.warning("%s", text)
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_SECONDS)
    import uvloop  # noqa: PLC0415 - bad flags and --help need no loop

    gc.freeze()  # what was imported stays: a collection that went through it held the loop for 10 ms more
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config))


async def serve(config: ServerConfig) -> int:
    """Start, say so, and serve until the end."""
    server = LivenessServer(config)
    loop = asyncio.get_running_loop()
    ended = False
    with LastResort() as last_resort:

        def on_signal(number: signal.Signals) -> None:
            nonlocal ended
            log.info("signal name=%s", number.name)
            if ended:
                server.terminate()
            last_resort.wait(LAST_SECONDS if ended else config.drain_seconds + LAST_SECONDS)
            ended = True
            server.close()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        try:
            await server.start()
        except LMLiveError as error:
            if ended:
                return CLEAN
            log.error("start failed error=%s", error)
            return FAILED
        announce(server)
        await server.serve_forever()
        return CLEAN if server.drained else CUT_OFF


class LastResort:
    """Ends the process when its end takes too long: a thread of a library may wait in the kernel for ever."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def wait(self, seconds: float) -> None:
        """Give it so much time from now on."""
        self.__exit__()
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        log.error("the end hangs: the process is ended as it stands")
        os._exit(CUT_OFF)


def announce(server: LivenessServer) -> None:
    """Print the ready line; a closed stdout is no reason to stop."""
    line = (
        f"lmlive ready bind={','.join(server.urls)} http={server.http_url or 'off'} "
        f"pid={os.getpid()} epoch={server.epoch:016x} version={__version__}\n"
    )
    full = _full_pipe(sys.stdout)
    if full is not None:  # whoever reads it will do so some day, and the server serves meanwhile
        # Beside the stream, whose lock nobody may hold when the interpreter ends.
        threading.Thread(target=_write, args=(full, line.encode()), name="lmlive-ready", daemon=True).start()
        return
    try:
        sys.stdout.write(line)
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError) as error:
        log.warning("ready line lost error=%s", error)
        # The interpreter flushes stdout once more at its exit, and would end with an error of its own.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            number = sys.stdout.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)


def _full_pipe(stream: TextIO) -> int | None:
    """Give the descriptor of a stream that takes nothing now; None for one that does, or has none."""
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return None if poll.poll(0) else number


def _write(number: int, line: bytes) -> None:
    with contextlib.suppress(OSError):  # whoever was to read it is gone
        os.write(number, line)


def open_standard_descriptors() -> None:
    """Put /dev/null where stdin, stdout or stderr was closed.

    Otherwise the first things that are opened get these numbers, and uvloop aborts the process at its end when it
    has to close one of them.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)


def raise_descriptor_limit() -> None:
    """Take as many descriptors as this process may have: each worker needs several."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
