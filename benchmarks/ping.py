"""How many PINGs a second does a server answer, and how fast, when four processes keep 64 in flight each?

A PING takes the whole way: the door, the header, the roster, the normal lane's thread, and back. Beside it stands a
bare Python loop over a raw ROUTER that echoes frames, which is what the machine and pyzmq give at most; and LMCache's
server, where the environment variable LMCACHE_PY names an interpreter that has it installed. They take turns, and each
figure is the median of its turns; absolute ones depend on the machine, ratios less so.
"""

import contextlib
import os
import socket
import statistics
import tempfile
from pathlib import Path

from _common import Row, arguments, report
from _pings import Load, Server, bare_echo, build_c_peer, lmcache_server, lmlive_server, load

RATE_GOAL = 100_000.0
RATIO_GOAL = 7.0


def free_ports() -> int:
    """Give a port that is free, with the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


def rows_of(name: str, loads: list[Load], *, goal: float | None = None, note: str = "") -> list[Row]:
    """Give the figures of one server under one kind of clients."""

    def median(values: list[float]) -> float:
        return statistics.median(values)

    return [
        Row(f"{name} rate", median([one.rate for one in loads]), "PING/s", goal, at_least=True, note=note),
        Row(f"{name} p50", median([one.at(0.5) for one in loads]), "us"),
        Row(f"{name} p99", median([one.at(0.99) for one in loads]), "us"),
        Row(f"{name} server CPU", median([one.cpu_us for one in loads]), "us/PING"),
    ]


def main() -> None:
    """Measure and report."""
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=4, help="client processes")
    parser.add_argument("--in-flight", type=int, default=64, help="requests in flight of each")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one turn")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    lmcache = os.environ.get("LMCACHE_PY", "")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lm-")))
        c_peer = build_c_peer(folder)
        servers: dict[str, Server] = {
            "lmlive": stack.enter_context(lmlive_server()),
            "bare echo": stack.enter_context(bare_echo()),
        }
        if lmcache:
            servers["LMCache"] = stack.enter_context(lmcache_server(lmcache, free_ports()))
        kinds: dict[str, Path | None] = {"Python clients": None}
        if c_peer is not None:
            kinds["C clients"] = c_peer
        found: dict[tuple[str, str], list[Load]] = {}
        for _ in range(options.turns):
            for kind, peer in kinds.items():
                for name, server in servers.items():
                    if peer is None or not server.parts:
                        result = load(server, options.clients, options.in_flight, options.seconds, peer)
                        found.setdefault((name, kind), []).append(result)
    best = "C clients" if c_peer is not None else "Python clients"
    note = "clients in C leave the machine to the server" if c_peer is not None else "no gcc, so clients share the CPUs"
    rows: list[Row] = []
    for (name, kind), loads in found.items():
        reaches = name == "lmlive" and kind == best
        rows += rows_of(f"{name}, {kind}", loads, goal=RATE_GOAL if reaches else None, note=note if reaches else "")
    rates = {key: statistics.median([one.rate for one in loads]) for key, loads in found.items()}
    for kind in kinds:
        share = rates["lmlive", kind] / rates["bare echo", kind]
        rows.append(Row(f"lmlive of bare echo, {kind}", share, "ratio"))
    ratio = None
    if lmcache:
        ratio = rates["lmlive", "Python clients"] / rates["LMCache", "Python clients"]
    rows.append(
        Row(
            "lmlive over LMCache, Python clients",
            ratio,
            "ratio",
            RATIO_GOAL,
            at_least=True,
            note="" if lmcache else "set LMCACHE_PY to an interpreter with lmcache==0.5.6",
        )
    )
    report(rows, as_json=options.json)


if __name__ == "__main__":
    main()
