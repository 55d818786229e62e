"""The workers around a model's server: they speak the raw wire, and have no manners."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from lmlive.protocol.codec import Header, decode_body, encode_request
from lmlive.protocol.verbs import Role, Verb
from lmlive.server.peers import Peer
from lmlive.testing.dealer import MemoryDealer
from tests.model.server_lives import Said
from tests.server.raw import bare, memory_file, register

TETHERED_ROUTE = 4 * 4096


@dataclass(eq=False)
class Worker:
    """One process that has, or had, to do with the server; a scheduler is one without an instance.

    Attributes:
        numbers: Gives ids of requests and keys of chunks that nobody had before.
        said: What all of them put into their REGISTERs.
    """

    name: str
    instance: int
    pid: int
    secret: bytes
    exit_fd: int
    numbers: Iterator[int]
    said: dict[str, Said]
    memories: dict[int, int] = field(default_factory=dict)
    asked: dict[int, Verb] = field(default_factory=dict)
    keys: list[bytes] = field(default_factory=list)
    dealer: MemoryDealer | None = None
    connection: int = 0
    peer: Peer | None = None
    epoch: int = 0
    old_epoch: int = 1
    generation: int = 0
    lease: str | None = None
    beats: bool = False
    stopped: bool = False
    killed: bool = False

    @property
    def role(self) -> Role:
        return Role.WORKER if self.instance else Role.SCHEDULER

    def memory(self, number: int) -> int:
        """Give the descriptor of one of its memories."""
        if number not in self.memories:
            self.memories[number] = memory_file(f"lmlive-model-{number}", TETHERED_ROUTE)
        return self.memories[number]

    def close_descriptors(self) -> None:
        for fd in (self.exit_fd, *self.memories.values()):
            os.close(fd)

    # What it says

    def send(self, verb: Verb, payload: list[object], **header: int) -> None:
        if self.dealer is None or self.killed:
            return
        number = next(self.numbers)
        self.asked[number] = verb
        fields = {"instance_id": self.instance, "epoch": self.epoch, "generation": self.generation} | header
        self.dealer.send(encode_request(verb, number, payload, **fields))

    def hello(self) -> None:
        self.send(Verb.HELLO, [1, 1, int(self.role), "model", self.secret])

    def ping(self, **header: int) -> None:
        self.send(Verb.PING, [self.instance], **header)

    def register(self, memory: int | None) -> None:
        model = self.model(memory)
        self.said[model] = Said(self.secret, memory)
        body = bare(self.secret, model) if memory is None else register(4, self.secret, model)
        self.send(Verb.REGISTER, body)

    def model(self, memory: int | None) -> str:
        """Name a model after a memory, so that its chunks are told from all others."""
        return f"{self.secret.hex()}.{memory}"

    def store(self, *, fresh: bool, **header: int) -> None:
        if fresh or not self.keys:
            self.keys.append(next(self.numbers).to_bytes(32, "big"))
        self.send(Verb.STORE, [self.keys[-1], [bytes(4)], 0, bytes(16)], **header)

    def retrieve(self, lease: str | None) -> None:
        if self.keys:
            self.send(Verb.RETRIEVE, [self.keys[-1], [bytes(4)], 0, lease])

    def look_up(self, of: "Worker", memory: int, *, lease: str | None = None, **header: int) -> None:
        """Look up what another stored last, and lease it."""
        if of.keys:
            fields = {"instance_id": 0, "generation": 0} | header
            self.send(Verb.LOOKUP, [of.model(memory), "", 1, of.keys[-1], lease], **fields)

    # What it hears

    def learn(self, header: Header, frame: bytes) -> None:
        """Read a reply that is no refusal."""
        self.epoch = header.epoch
        verb = self.asked.get(header.request_id)
        if verb is Verb.REGISTER:
            self.generation = header.generation
        elif verb is Verb.LOOKUP:
            self.lease = decode_body(frame)[1] or self.lease  # type: ignore[assignment]
