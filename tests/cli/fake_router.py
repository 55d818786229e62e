"""A ROUTER in a thread that answers what a test tells it to, for servers that no real one would be."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from lmlive.protocol.codec import Header, decode_header, encode_error, encode_pong, encode_reply
from lmlive.protocol.replies import LIMIT_NAMES
from lmlive.protocol.verbs import Verb

EPOCH = 0xAB

Respond = Callable[[Header], bytes | None]

HEALTHY: dict[str, object] = {
    "server": {"pid": 7, "epoch": f"{EPOCH:016x}", "version": "0.1.0", "state": "serving", "uptime_seconds": 500.0},
    "liveness": {
        "reap_timeout_seconds": 120.0,
        "registration_grace_seconds": 3600.0,
        "scan_interval_seconds": 30.0,
        "last_scan_age_seconds": 12.0,
        "watched_seconds": 499.0,
        "tracked_instances": 1,
        "reaps": {"exit": 1, "silence": 0, "never_pinged": 0, "target": 0},
        "removals": {"unregistered": 2, "superseded": 0},
    },
    "instances": [
        {
            "instance_id": "77",
            "generation": 3,
            "model": "llama",
            "rank": 0,
            "pid": None,
            "state": "active",
            "held": False,
            "proven": True,
            "evidence": "process",
            "mode": "server_driven",
            "device": "host",
            "silent_for_seconds": 1.25,
            "registered_for_seconds": 7300.0,
            "mapped_bytes": 3 << 20,
            "in_flight": 0,
            "pings": 41,
        }
    ],
    "releases": {"pending": 0, "done": 3, "by_exit": 0, "stuck": 0},
    "pool": {
        "bytes": 2 << 30,
        "used_bytes": 512 << 20,
        "chunks": 8,
        "leased_chunks": 1,
        "reserved_chunks": 0,
        "held_back_chunks": 0,
        "evictions": 0,
        "refusals": 0,
    },
    "lanes": {"normal": {"threads": 1, "busy": 0, "queued": 0}},
    "wire": {
        "frames": 9,
        "bad_frames": 1,
        "replies": 9,
        "dropped_replies": 0,
        "handshake_failures": 0,
        "errors": {"InvalidPayload": 1},
    },
}


def with_changes(**sections: dict[str, object]) -> dict[str, object]:
    """Give the healthy status with some values replaced."""
    changed = dict(HEALTHY)
    for name, values in sections.items():
        part = HEALTHY[name]
        assert isinstance(part, dict)
        changed[name] = {**part, **values}
    return changed


def answering(status: dict[str, object] = HEALTHY) -> Respond:
    """Answer as a server does that has this status."""

    def respond(header: Header) -> bytes | None:
        results: dict[int, object] = {
            Verb.STATUS: status,
            Verb.REAP: header.instance_id == 0,
            Verb.CLEAR: 8,
        }
        if header.code == Verb.PING:
            return encode_pong(header.request_id, EPOCH, 0, 0)
        if header.code == Verb.HELLO:
            limits = dict.fromkeys(LIMIT_NAMES, 1)
            return encode_reply(header.request_id, EPOCH, 0, 0, [1, 256, 10.0, 120.0, limits, None, 1])
        return encode_reply(header.request_id, EPOCH, 0, 0, [results[header.code]])

    return respond


def refusing(verb: Verb, error: Exception) -> Respond:
    """Answer one verb with an error."""
    usual = answering()
    return lambda header: encode_error(header.request_id, EPOCH, 0, 0, error) if header.code == verb else usual(header)


@contextmanager
def fake_router(run_dir: Path, respond: Respond) -> Iterator[str]:
    """Serve until the end of the block, and give the address."""
    url = f"ipc://{run_dir}/router.sock"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.bind(url)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            if router.poll(20):
                peer, frame = router.recv_multipart()
                reply = respond(decode_header(frame))
                if reply is not None:
                    router.send_multipart([peer, reply])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield url
    finally:
        stop.set()
        thread.join()
        router.close(0)
        context.term()
