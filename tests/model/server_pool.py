"""What the oracle of a whole server knows of the pool: which chunks were published, and who leased them until when.

A chunk is told by the name of the model it was stored for and its key: whoever registers gives its memory a name of
its own. A lease of the dead, and a chunk that was never published, are what must never be seen.
"""

from dataclasses import dataclass

from tests.model.server_lives import Ask, Life

CHUNK_TOKENS = 16
LEASE_SECONDS = 60.0

Chunk = tuple[str, bytes]


@dataclass(eq=False)
class Leased:
    """One lease."""

    owner: bytes
    deadline: float
    chunk: Chunk


class Pool:
    """Chunks and leases, as they must be."""

    def __init__(self) -> None:
        self.published: set[Chunk] = set()
        self.leases: dict[str, Leased] = {}

    def find(self, lease: object, running: float) -> Leased | None:
        found = self.leases.get(str(lease))
        return found if found is not None and found.deadline > running else None

    def end_owner(self, secret: bytes) -> None:
        self.leases = {lease: leased for lease, leased in self.leases.items() if leased.owner != secret}

    def leased_chunks(self, running: float) -> int:
        """Count what is leased at a time of the running clock."""
        return len({leased.chunk for leased in self.leases.values() if leased.deadline > running})

    # Requests, as they are read

    def retrieve(self, ask: Ask, chunk: Chunk, lease: object, running: float) -> None:
        """Say what a RETRIEVE gives, and use up its lease if that is of this chunk."""
        used = False
        leased = self.find(lease, running)
        if leased is not None and leased.chunk == chunk:
            del self.leases[str(lease)]
            used = True
        ask.copies = chunk in self.published
        missed = "lease_lost" if lease is not None and not used else "miss"
        ask.wanted = [CHUNK_TOKENS, "loaded"] if ask.copies else [0, missed]

    def look_up(self, ask: Ask, chunk: Chunk, lease: object, running: float, *, has_worker: bool) -> None:
        """Say what a LOOKUP gives: the chunk with a lease on it, or nothing."""
        found = has_worker and chunk in self.published
        ask.wanted = [CHUNK_TOKENS if found else 0, "hit" if found else "miss" if has_worker else "no_worker"]
        ask.chunk = chunk if found else None
        renewed = self.find(lease, running)
        if renewed is not None:
            renewed.deadline = running + LEASE_SECONDS
            renewed.chunk = chunk if found else renewed.chunk
            ask.lease = str(lease)

    def release(self, ask: Ask, lease: object, running: float) -> None:
        ask.wanted = [self.find(lease, running) is not None]
        self.leases.pop(str(lease), None)

    # Requests, as they are answered

    def check_store(self, ask: Ask, body: list[object], life: Life) -> None:
        tokens, chunks, reason = body
        assert ask.chunk is not None
        if chunks:
            assert life.end is None, "published for the dead"
            assert ask.chunk not in self.published, "published twice"
            self.published.add(ask.chunk)
        there = ask.chunk in self.published
        assert (chunks, reason) in {(1, "stored"), (0, "present"), (0, "in_progress")}
        assert tokens == (CHUNK_TOKENS if there else 0)
        assert there == (reason != "in_progress")

    def check_look_up(self, ask: Ask, body: list[object], secret: bytes, running: float) -> None:
        tokens, lease, seconds, reason = body
        assert [tokens, reason] == ask.wanted
        assert seconds == LEASE_SECONDS
        if ask.lease:
            assert lease == ask.lease, "a lease that was renewed keeps its name"
        elif ask.chunk is None:
            assert lease is None, "leased nothing"
        else:
            assert isinstance(lease, str)
            assert lease not in self.leases
            self.leases[lease] = Leased(secret, running + LEASE_SECONDS, ask.chunk)
