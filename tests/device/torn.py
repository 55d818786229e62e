"""Copies from and to unsealed memory whose size is changed meanwhile, in a process of its own that a signal would end.

``python -m tests.device.torn RUN HOW``: blocks of RUN bytes; HOW is ``at-slice``, where the memory shrinks after the
question whether to go on, or ``loop``, where a thread shrinks and grows it all the time. Prints how the copies ended.
"""

import os
import sys
import threading
from collections import Counter

import numpy as np

from lmlive.device.context import CacheContext
from lmlive.device.host import HostBackend
from lmlive.errors import InvalidHandle
from tests.device.memfds import gather, one_plane, scatter, unsealed_source

BLOCKS = 16
ROUNDS = 300


def main(run: int, how: str) -> None:
    """Copy again and again."""
    size = BLOCKS * run
    source = unsealed_source(np.ones(size, np.uint8))
    peer = os.dup(source.fd)
    context = CacheContext.open(HostBackend(), [source], one_plane(BLOCKS, run))
    memory = np.zeros(size, np.uint8)
    blocks = np.random.default_rng(0).permutation(BLOCKS)
    ended: Counter[str] = Counter()
    stop = threading.Event()

    def shrink_and_grow() -> None:
        while not stop.is_set():
            os.ftruncate(peer, 0)
            os.ftruncate(peer, size)

    def shrink() -> bool:
        if how == "at-slice":
            os.ftruncate(peer, 0)
        return True

    thread = threading.Thread(target=shrink_and_grow, daemon=True)
    if how == "loop":
        thread.start()
    for _ in range(ROUNDS if how == "loop" else 1):
        for copy in (gather, scatter):
            os.ftruncate(peer, size)
            try:
                ended[str(copy(context, [blocks], memory, shrink))] += 1
            except InvalidHandle:
                ended["InvalidHandle"] += 1
    stop.set()
    if how == "loop":
        thread.join()
    context.close()
    os.close(peer)
    print(*sorted(ended))  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
