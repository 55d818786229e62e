"""What the server holds for each generation, and its way to release.

A ``ContextEntry`` is one generation's cache context and its borrows; liveness is the registration's business, not
this file's. An entry is live while its registration is, then condemned while a transfer still borrows it, then
releasing, then released or stuck. It becomes releasable exactly once; the server closes it off the loop.

Loop thread only.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from lmlive.cache.keys import Namespace
from lmlive.cache.layout import KVLayout
from lmlive.device.context import CacheContext
from lmlive.errors import InternalError
from lmlive.liveness.roster import Registration


class EntryState(StrEnum):
    """Where an entry stands; after ``LIVE`` there is no way back."""

    LIVE = "live"
    CONDEMNED = "condemned"
    RELEASING = "releasing"
    STUCK = "stuck"
    RELEASED = "released"


@dataclass(slots=True, eq=False)
class ContextEntry:
    """One generation's memory as the server holds it.

    Args:
        registration: The roster's record of this generation; removed from the roster once the entry is not live.
        context: The opened mappings; None for a registration without a cache.
        layout: Shape of that cache; None without one.
        namespace: What the store keys this worker's chunks by; None without a cache.
        strategy: How a worker copies that does it by itself, "shm" or "inline"; empty where the server copies. It is
            one with the rest: there is never a context without its strategy, nor a strategy without its context.
        in_flight: How many transfers borrow it.
        state: Where it stands.
        waiters: Called once when the entry is released.

    Attributes:
        mapped_bytes: Bytes of the worker's memory mapped here; 0 once it is released, and not before.
    """

    registration: Registration
    context: CacheContext | None = None
    layout: KVLayout | None = None
    namespace: Namespace | None = None
    strategy: str = ""
    in_flight: int = 0
    state: EntryState = EntryState.LIVE
    waiters: list[Callable[[], None]] = field(default_factory=list)
    mapped_bytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Note how much is mapped: the entry answers for it until it is released."""
        if self.context is not None:
            self.mapped_bytes = self.context.mapped_bytes

    @property
    def instance_id(self) -> int:
        """Whose it is."""
        return self.registration.instance_id

    @property
    def generation(self) -> int:
        """Which registration it belongs to."""
        return self.registration.generation

    @property
    def live(self) -> bool:
        """Whether its registration still stands: only then may a STORE be published."""
        return self.state is EntryState.LIVE

    def __repr__(self) -> str:
        """Name the generation and its state."""
        return (
            f"<ContextEntry instance={self.instance_id} generation={self.generation} "
            f"{self.state.value} in_flight={self.in_flight}>"
        )


@dataclass(slots=True)
class ReleaseCounts:
    """Releases since the start."""

    done: int = 0
    by_exit: int = 0


class Entries:
    """All context entries that are not released yet."""

    def __init__(self) -> None:
        self.releasable: deque[ContextEntry] = deque()
        self.on_releasable: Callable[[], None] = _nothing
        self.releases = ReleaseCounts()
        self._unreleased: dict[ContextEntry, None] = {}
        self._gone: dict[ContextEntry, None] = {}
        self._borrowed: dict[ContextEntry, None] = {}
        self._all_of_instance: dict[int, dict[ContextEntry, None]] = {}
        self._live: dict[int, ContextEntry] = {}
        self._of_instance: dict[int, ContextEntry] = {}
        self._layouts: dict[tuple[str, str, int], dict[int, Counter[bytes]]] = {}
        self._layout_of: dict[Namespace, KVLayout] = {}

    def __len__(self) -> int:
        """Count what is not released."""
        return len(self._unreleased)

    def __iter__(self) -> Iterator[ContextEntry]:
        """Go through a copy of all that is not released."""
        return iter(tuple(self._unreleased))

    def install(self, entry: ContextEntry) -> None:
        """Take in a new live entry; its predecessor must be detached already."""
        if entry.generation in self._live or entry.instance_id in self._of_instance:
            raise InternalError("a live entry was installed twice", generation=entry.generation)
        self._take_in(entry)
        self._live[entry.generation] = entry
        self._of_instance[entry.instance_id] = entry
        if entry.namespace is not None:
            self._count_layout(entry.namespace, 1)
            if entry.layout is not None:
                self._layout_of[entry.namespace] = entry.layout

    def discard(self, entry: ContextEntry) -> None:
        """Take in what was opened and must never be live, to be released."""
        self._take_in(entry)
        self._gone[entry] = None
        self._make_releasable(entry)

    def borrow(self, generation: int) -> ContextEntry | None:
        """Hold a live entry for one transfer; None if there is none live."""
        entry = self._live.get(generation)
        if entry is not None:
            entry.in_flight += 1
            self._borrowed[entry] = None
        return entry

    def give_back(self, entry: ContextEntry) -> None:
        """End one borrow; the last one of a condemned entry makes it releasable."""
        if entry.in_flight <= 0:
            raise InternalError("an entry was given back more often than borrowed", generation=entry.generation)
        entry.in_flight -= 1
        if entry.in_flight:
            return
        del self._borrowed[entry]
        if entry.state is EntryState.CONDEMNED:
            self._make_releasable(entry)

    def detach(self, generation: int) -> ContextEntry | None:
        """Let go of a live entry: condemned while borrowed, else releasable at once; None if there is none live."""
        entry = self._live.pop(generation, None)
        if entry is None:
            return None
        entry.state = EntryState.CONDEMNED
        self._gone[entry] = None
        del self._of_instance[entry.instance_id]
        if entry.namespace is not None:
            self._count_layout(entry.namespace, -1)
        if entry.in_flight == 0:
            self._make_releasable(entry)
        return entry

    def released(self, entry: ContextEntry, *, by_exit: bool = False) -> None:
        """Note that an entry's mappings are gone; also for one that was stuck."""
        if entry.state not in (EntryState.RELEASING, EntryState.STUCK):
            raise InternalError("an entry was released out of turn", generation=entry.generation, state=entry.state)
        entry.state = EntryState.RELEASED
        entry.mapped_bytes = 0
        del self._unreleased[entry]
        del self._gone[entry]
        siblings = self._all_of_instance[entry.instance_id]
        del siblings[entry]
        if not siblings:
            del self._all_of_instance[entry.instance_id]
        self.releases.done += 1
        self.releases.by_exit += by_exit
        waiters, entry.waiters = entry.waiters, []
        for waiter in waiters:
            waiter()

    def stuck(self, entry: ContextEntry) -> None:
        """Note that an entry's release is past its deadline; it stays listed until a late success."""
        if entry.state is EntryState.RELEASING:
            entry.state = EntryState.STUCK

    def find(self, instance_id: int) -> ContextEntry | None:
        """Give the live entry of an instance."""
        return self._of_instance.get(instance_id)

    def unreleased(self, instance_id: int) -> list[ContextEntry]:
        """Give every entry of an instance that is not released: at most one live one, and its ghosts."""
        return list(self._all_of_instance.get(instance_id, ()))

    @property
    def gone(self) -> Iterator[ContextEntry]:
        """Go through what is not live any more and not released yet."""
        return iter(tuple(self._gone))

    @property
    def borrowed(self) -> Iterator[ContextEntry]:
        """Go through what a transfer borrows now."""
        return iter(tuple(self._borrowed))

    def layouts(self, model: str, revision: str, world_size: int) -> Mapping[int, Mapping[bytes, int]]:
        """Give rank -> layout key -> number of live workers, for the live workers of a model."""
        return self._layouts.get((model, revision, world_size), {})

    def layout_of(self, namespace: Namespace) -> KVLayout | None:
        """Give the layout of live workers: who shares a namespace has chunks of the same form."""
        return self._layout_of.get(namespace)

    @property
    def pending(self) -> int:
        """How many are condemned or releasing."""
        return sum(entry.state in (EntryState.CONDEMNED, EntryState.RELEASING) for entry in self._gone)

    @property
    def stuck_count(self) -> int:
        """How many releases are past their deadline."""
        return sum(entry.state is EntryState.STUCK for entry in self._gone)

    def _take_in(self, entry: ContextEntry) -> None:
        self._unreleased[entry] = None
        self._all_of_instance.setdefault(entry.instance_id, {})[entry] = None

    def _make_releasable(self, entry: ContextEntry) -> None:
        entry.state = EntryState.RELEASING
        self.releasable.append(entry)
        self.on_releasable()

    def _count_layout(self, namespace: Namespace, change: int) -> None:
        family = (namespace.model, namespace.revision, namespace.world_size)
        ranks = self._layouts.setdefault(family, {})
        keys = ranks.setdefault(namespace.rank, Counter())
        keys[namespace.layout_key] += change
        if keys[namespace.layout_key] <= 0:
            del keys[namespace.layout_key]
            self._layout_of.pop(namespace, None)
        if not keys:
            del ranks[namespace.rank]
        if not ranks:
            del self._layouts[family]


def _nothing() -> None:
    """Stand in until somebody asks to be told."""
