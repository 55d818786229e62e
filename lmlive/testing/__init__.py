"""Doubles for tests of programs that embed lmlive; lmlive's own tests use the same.

* ``ManualClock`` and ``VirtualLoop`` (with ``run_virtual``): time that jumps, exactly.
* ``MemoryNetwork``: a router and its peers without sockets; held, lost, late and reordered messages on order.
* ``RecordingBackend``: a device with a ledger that fails (``fail``) and hangs (``gate``) on order.
* ``ServerProcess``: a real server in a process of its own, to be killed, stopped and looked into.

Nothing in lmlive imports this package.
"""

from lmlive.testing.clock import ManualClock
from lmlive.testing.dealer import MemoryDealer, Reply
from lmlive.testing.device import RecordedMapping, RecordingBackend
from lmlive.testing.gate import Gate
from lmlive.testing.loop import VirtualLoop, run_virtual
from lmlive.testing.network import Held, MemoryNetwork, MemoryRouter, Message
from lmlive.testing.processes import ServerProcess

__all__ = [
    "Gate",
    "Held",
    "ManualClock",
    "MemoryDealer",
    "MemoryNetwork",
    "MemoryRouter",
    "Message",
    "RecordedMapping",
    "RecordingBackend",
    "Reply",
    "ServerProcess",
    "VirtualLoop",
    "run_virtual",
]
