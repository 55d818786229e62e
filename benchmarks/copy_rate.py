"""How close do the copies between a worker's memory and the arena come to memcpy?

Gathers and scatters chunks of 256 tokens (16 blocks of 16 tokens in every plane, block ids in random order) through a
cache context over a real memfd, beside memcpy of the same bytes, chunk by chunk, in the same run and in turns. One
thread, CPU time, best of the rounds. A memcpy of everything at once is shown as well: beyond the C library's threshold
for streaming stores (114 MiB on some machines) it does not read what it overwrites. Copies of single blocks come to
that, from runs of 32 KiB, only with ``GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x8000``.

Unsealed memory is not mapped but read and written at positions, a system call for each row of adjacent blocks: shown
for blocks in random order, and without a goal.
"""

import os
import time
from collections.abc import Callable

import numpy as np
from _common import Row, arguments, report

from lmlive.device import syscalls
from lmlive.device.backend import Bytes, Chunk, FdSource, GroupPlace, PlanePlace
from lmlive.device.context import CacheContext
from lmlive.device.host import HostBackend
from lmlive.device.pool import PoolMemory

KIB = 1 << 10
MIB = 1 << 20
BLOCKS_PER_CHUNK = 16
GOALS = {16 * KIB: 0.60, 32 * KIB: 0.75, 64 * KIB: 0.90, 256 * KIB: 0.90, 2 * MIB: 0.90}


def measure(run: int, nbytes: int, rounds: int) -> list[Row]:
    """Copy all of a worker's memory in chunks, in every way, in turns."""
    planes = max(1, min(64, 16 * MIB // (run * BLOCKS_PER_CHUNK)))
    chunk_bytes = planes * run * BLOCKS_PER_CHUNK
    count = nbytes // chunk_bytes
    num_blocks = count * BLOCKS_PER_CHUNK
    total = count * chunk_bytes
    pool = PoolMemory(total)
    pool.populate()
    fd = syscalls.make_memfd("lmlive-bench", total)
    os.posix_fallocate(fd, 0, total)
    worker = syscalls.map_shared(fd, total)
    source = syscalls.view_of(worker, total)
    source[:] = np.arange(total, dtype=np.uint8)
    plain = os.memfd_create("lmlive-bench", os.MFD_CLOEXEC)
    os.posix_fallocate(plain, 0, total)
    places = tuple(PlanePlace(0, plane * num_blocks * run, run, run) for plane in range(planes))
    context, unsealed = (
        CacheContext.open(HostBackend(), [FdSource(memory, total, os.geteuid())], [GroupPlace(num_blocks, places)])
        for memory in (fd, plain)
    )
    ids = np.random.default_rng(0).permutation(num_blocks).reshape(count, BLOCKS_PER_CHUNK)
    arena: list[Bytes] = [pool.view[n * chunk_bytes : (n + 1) * chunk_bytes] for n in range(count)]
    chunks = [Chunk([blocks], memory) for blocks, memory in zip(ids, arena, strict=True)]
    spans = [source[n * chunk_bytes : (n + 1) * chunk_bytes] for n in range(count)]

    def memcpy() -> None:
        for memory, span in zip(arena, spans, strict=True):
            np.copyto(memory, span)

    ways: dict[str, Callable[[], object]] = {
        "memcpy": memcpy,
        "memcpy_at_once": lambda: np.copyto(pool.view, source),
        "gather": lambda: context.gather_chunks(chunks, lambda: True),
        "scatter": lambda: context.scatter_chunks(chunks, lambda: True),
        "gather unsealed": lambda: unsealed.gather_chunks(chunks, lambda: True),
        "scatter unsealed": lambda: unsealed.scatter_chunks(chunks, lambda: True),
    }
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            begun = time.thread_time()
            way()
            seconds[name] = min(seconds[name], time.thread_time() - begun)
    context.close()
    unsealed.close()
    syscalls.unmap(worker, total)
    pool.close()
    rows = []
    for name in ("gather", "scatter", "gather unsealed", "scatter unsealed"):
        rate, copied, at_once = (total / seconds[way] / 1e9 for way in (name, "memcpy", "memcpy_at_once"))
        note = f"{rate:.1f} GB/s beside {copied:.1f} by chunks of {chunk_bytes >> 20} MiB, {at_once:.1f} all at once"
        goal = None if "unsealed" in name else GOALS[run]
        rows.append(Row(f"{name}, runs of {run >> 10} KiB", rate / copied, "memcpy", goal, at_least=True, note=note))
    return rows


def main() -> None:
    """Measure each run length and print."""
    parser = arguments("How close do the copies between a worker's memory and the arena come to memcpy?")
    parser.add_argument("--mib", type=int, default=512, help="how much memory to copy (default 512)")
    parser.add_argument("--rounds", type=int, default=7, help="the best of so many counts (default 7)")
    chosen = parser.parse_args()
    report([row for run in GOALS for row in measure(run, chosen.mib * MIB, chosen.rounds)], as_json=chosen.json)


if __name__ == "__main__":
    main()
