"""A server whose stderr nobody reads."""

import asyncio
import signal
import sys
from pathlib import Path

from lmlive.protocol.verbs import Verb
from tests.conftest import eventually
from tests.server.raw import Raw, bare


async def test_a_full_stderr_stops_neither_answers_nor_the_exit(run_dir: Path) -> None:
    flags = ("--run-dir", str(run_dir), "--pool-bytes", "1MiB")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lmlive.server", *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        limit=1024,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    await process.stdout.readline()
    transport = process._transport.get_pipe_transport(2)  # type: ignore[attr-defined]
    transport.pause_reading()
    async with Raw(f"ipc://{run_dir}/router.sock") as raw:
        for number in range(1, 1500):  # three lines each hold more than a pipe does
            secret = number.to_bytes(16, "big")
            assert (await raw.ask(Verb.REGISTER, bare(secret), instance_id=number))[0].code == 0
        assert await raw.silent()
    process.send_signal(signal.SIGTERM)
    assert await eventually(lambda: process.returncode is not None, within=15.0)
    assert process.returncode == 0
    transport.resume_reading()
    await process.stderr.read()
    await process.wait()
