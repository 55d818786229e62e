"""Another build: one of its rules is changed, then a module is run by it.

``python -m tests.processes.kv_other CHANGE MODULE [ARGUMENT ...]``. What that raises is its last line, in JSON.
"""

import json
import runpy
import sys
from collections.abc import Callable
from typing import Any

from lmlive.errors import LMLiveError
from lmlive.modules import management
from lmlive.protocol import versions
from lmlive.protocol.codec import Header, decode_body
from lmlive.protocol.fields import Fields
from lmlive.protocol.messages import Ping
from lmlive.worker import tying

THIS = "tests.processes.kv_other"
WIRE = versions.Versions(2, 3)


def wire() -> None:
    """Speak other versions of the wire, none of ours among them."""
    versions.SPOKEN = WIRE


def ping_of(count: int) -> None:
    """Have so many fields in a PING, and say nothing of it in the version: 0 as it was before it had an id."""

    def check(frame: bytes, header: Header) -> None:
        Fields("PING", decode_body(frame), count)

    def to_payload(ping: Ping) -> list[object]:
        return [ping.instance_id] * count

    side: Any = management
    side._check_ping = check
    side = Ping
    side.to_payload = to_payload


def far() -> None:
    """Find no tether, as on another machine."""
    side: Any = tying
    side.tether_path = lambda *_: None


CHANGES: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "wire": wire,
    "ping-of-0": lambda: ping_of(0),
    "ping-of-2": lambda: ping_of(2),
    "far": far,
}


if __name__ == "__main__":
    CHANGES[sys.argv[1]]()
    del sys.argv[1]
    try:
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    except LMLiveError as error:
        sys.stdout.write(json.dumps({"raised": type(error).__name__, **error.fields}) + "\n")
