"""The ``lmlive`` command: asks a running server over its ROUTER, and starts one with ``serve``.

It needs no HTTP, no event loop and no numpy, so that it answers at once. Exit status: 0 ok, 1 no answer or refused,
2 wrong usage, 4 reached but unhealthy.
"""

from lmlive.cli.command import main

__all__ = ["main"]
