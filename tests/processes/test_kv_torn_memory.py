"""Peers that take their memory away while the server copies it; through a mapping SIGBUS would end the server."""

import ctypes
import os
import threading
from pathlib import Path

import pytest

from lmlive.errors import InvalidHandle
from lmlive.protocol.messages import parse_error
from lmlive.protocol.verbs import Verb
from lmlive.testing.processes import ServerProcess
from tests.end_to_end.peer import BLOCKS, peer, retrieve_of, store_of
from tests.end_to_end.scene import CHUNK, PER_CHUNK, plain, prompt
from tests.server.raw import BLOCK_BYTES

TOKENS = prompt(2 * CHUNK)
HERE = list(range(2 * PER_CHUNK))
WHOLE = BLOCKS * BLOCK_BYTES
SMALL = ("--pool-bytes", "2MiB", "--chunk-tokens", str(CHUNK))


def unsealed(name: str) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.write(fd, os.urandom(WHOLE))
    return fd


@pytest.mark.parametrize("left", [0, WHOLE - 4096])
async def test_a_peer_that_truncates_its_memory_gets_an_error_and_harms_nobody(run_dir: Path, left: int) -> None:
    witness = plain(seed=1)
    async with ServerProcess(*SMALL, run_dir=run_dir) as server, witness.worker(server.url) as other:
        assert (await other.store(TOKENS, HERE)).reason == "stored"
        mine = prompt(2 * CHUNK, 4)
        async with peer(server) as one:
            fd = unsealed("lmlive-torn")
            await one.register(fd)
            assert await one.store(store_of(mine, HERE)) == [2 * CHUNK, 2, "stored"]
            os.ftruncate(fd, left)
            for verb, payload in (
                (Verb.STORE, store_of(prompt(2 * CHUNK, 5), HERE)),
                (Verb.RETRIEVE, retrieve_of(mine, HERE)),
            ):
                error = await one.refused(verb, payload)
                assert (type(error), error.size, error.needed) == (InvalidHandle, left, WHOLE)
            status = await one.raw.status()
            assert (status["pool"]["chunks"], status["pool"]["reserved_chunks"]) == (4, 0)
            # with its size back it is as good as before
            os.ftruncate(fd, WHOLE)
            assert await one.retrieve(retrieve_of(mine, HERE)) == [2 * CHUNK, "loaded"]
            os.ftruncate(fd, left)
            assert await one.raw.result(Verb.UNREGISTER, [one.secret], instance_id=7) == [True]
            assert not server.holds("lmlive-torn")
            os.close(fd)
        wanted = witness.content(HERE)
        assert (await other.retrieve(TOKENS, list(range(40, 48)))).reason == "loaded"
        assert witness.content(range(40, 48)) == wanted
        assert await other.ping()


async def test_a_peer_that_truncates_its_memory_all_the_time_harms_nobody(run_dir: Path) -> None:
    async with ServerProcess(*SMALL, run_dir=run_dir) as server, peer(server) as one:
        fd = unsealed("lmlive-torn")
        await one.register(fd)
        stop = threading.Event()

        def shrink_and_grow() -> None:
            while not stop.is_set():
                os.ftruncate(fd, 0)
                os.ftruncate(fd, WHOLE)

        thread = threading.Thread(target=shrink_and_grow)
        thread.start()
        try:
            for number in range(200):
                header, body = await one.raw.ask(Verb.STORE, store_of(prompt(2 * CHUNK, number), HERE), **one.header())
                assert not header.code or isinstance(parse_error(header.code, body), InvalidHandle)
        finally:
            stop.set()
            thread.join()
        os.close(fd)
        assert (await one.raw.status())["server"]["pid"] == server.pid


async def test_memory_that_was_truncated_is_refused_at_register(run_dir: Path) -> None:
    async with ServerProcess(*SMALL, run_dir=run_dir) as server, peer(server) as one:
        fd = unsealed("lmlive-torn")
        os.ftruncate(fd, WHOLE - 1)
        header, body = await one.register(fd)
        assert isinstance(parse_error(header.code, body), InvalidHandle)
        os.close(fd)
        assert not server.holds("lmlive-torn")
        assert (await one.raw.status())["instances"] == []


async def test_holes_that_a_peer_makes_later_are_read_as_zeros(run_dir: Path) -> None:
    punch = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    libc = ctypes.CDLL(None, use_errno=True)
    async with ServerProcess(*SMALL, run_dir=run_dir) as server, peer(server) as one:
        fd = unsealed("lmlive-torn")
        await one.register(fd)
        assert libc.fallocate(fd, punch, ctypes.c_long(0), ctypes.c_long(WHOLE)) == 0
        assert await one.store(store_of(TOKENS, HERE)) == [2 * CHUNK, 2, "stored"]
        os.pwrite(fd, os.urandom(WHOLE), 0)
        assert await one.retrieve(retrieve_of(TOKENS, HERE)) == [2 * CHUNK, "loaded"]
        assert os.pread(fd, len(HERE) * BLOCK_BYTES, 0) == bytes(len(HERE) * BLOCK_BYTES)
        os.close(fd)
