"""A naive oracle for a whole server: it reads what went in and out, and judges it by the written rules.

It keeps every life with every sign of it, derives each answer anew, and knows nothing of how the server does it. What
goes in tells it what must happen; what comes out must be that, and nothing else.
"""

from collections import Counter
from collections.abc import Callable

from lmlive.liveness.policy import ReapPolicy
from lmlive.liveness.watch import Moment
from lmlive.protocol.verbs import Verb
from lmlive.server.status import InstancePart, PoolPart, ServerStatus
from tests.model.server_ground import Seen
from tests.model.server_history import VERDICTS, History
from tests.model.server_hours import Hours
from tests.model.server_lives import Life, Said
from tests.model.server_pool import Pool
from tests.model.server_requests import PATIENCE, Requests


class Oracle:
    """History, and the rules said as plainly as possible."""

    def __init__(self, policy: ReapPolicy, epoch: int, said: dict[str, Said]) -> None:
        self.hours = Hours(policy)
        self.pool = Pool()
        self.history = History(self.hours, self.pool, said)
        self.requests = Requests(self.history, epoch)
        self.steps: dict[str, Callable[..., None]] = {
            "tick": self.hours.on_tick,
            "stall": self.hours.on_stall,
            "sleep": self.hours.on_sleep,
            "frame": self.requests.on_frame,
            "taken": self.requests.on_taken,
            "told": self.requests.told.append,
            "reply": self.requests.on_reply,
            "event": self.history.on_event,
            "drop": self.history.on_drop,
            "scan": self.history.on_scan,
            "exit": self.history.on_exit,
            "lost": self.history.on_lost,
            "channel": self.history.on_channel,
            "tether": self.history.on_tether,
            "close": self.history.on_close,
        }

    def judge(self, seen: Seen) -> None:
        """Read what happened next."""
        self.hours.now = seen.at
        if seen.kind not in ("event", "drop"):
            assert not self.history.owed, f"not removed: {self.history.owed}"
        self.steps[seen.kind](*seen.facts)

    # At rest

    def check_status(self, status: ServerStatus) -> None:
        assert not self.history.owed
        assert all(life.released for life in self.requests.let_go_of), "True, and its memory is still mapped"
        self.requests.let_go_of.clear()
        for ask in self.requests.asks.values():
            assert ask.verb != Verb.UNREGISTER or self.hours.now <= ask.at + PATIENCE, "too patient"
        liveness = status.liveness
        ends = Counter(life.end for life in self.history.lives if life.end is not None)
        reaps = liveness.reaps
        assert (reaps.exit, reaps.silence, reaps.never_pinged, reaps.target) == tuple(
            ends[reason] for reason in VERDICTS[:4]
        )
        removals = liveness.removals
        assert (removals.unregistered, removals.superseded) == (ends["unregistered"], ends["superseded"])
        assert liveness.tracked_instances == len(self.history.living)
        now = self.hours.present_moment
        gone = [life for life in self.history.lives if life.end is not None and not life.released]
        rows = {row.generation: row for row in status.instances}
        assert len(rows) == len(status.instances), "a generation is in two states"
        assert set(rows) == {life.generation for life in [*self.history.living.values(), *gone]}
        for life in self.history.living.values():
            self.check_row(life, rows[life.generation], now)
        for life in gone:
            row = rows[life.generation]
            wanted = "condemned" if life.borrows else "stuck" if life.stuck else "releasing"
            assert row.state == wanted, f"{row.state}, not {wanted}"
            assert row.in_flight == life.borrows
            assert row.mapped_bytes > 0
        assert status.wire.errors.get("InternalError", 0) == 0
        self.check_pool(status.pool, now)

    def check_pool(self, pool: PoolPart, now: Moment) -> None:
        # An end by time is seen by the next tick; every other end has its effect at once.
        at_most = self.pool.leased_chunks(self.hours.ticked.running) if self.hours.sums else 0
        assert self.pool.leased_chunks(now.running) <= pool.leased_chunks <= at_most, "leased by the dead, or lost"
        asks = self.requests.asks.values()
        stores = [ask.life.end for ask in asks if ask.life is not None and ask.verb == Verb.STORE]
        assert pool.reserved_chunks == stores.count(None), "reserved for the dead"
        assert pool.held_back_chunks == len(stores) - stores.count(None)
        assert pool.chunks == len(self.pool.published)

    def check_row(self, life: Life, row: InstancePart, now: Moment) -> None:
        assert row.instance_id == str(life.instance)
        assert row.state == ("suspect" if life.suspect else "active") or life.perhaps_suspect, f"{row} {life}"
        assert row.held == life.held
        assert row.pings == life.pings
        assert row.proven == (life.pings > 0)
        assert row.silent_for_seconds == self.hours.silence(life, now)
        assert row.in_flight == life.borrows
        assert (row.mapped_bytes > 0) == (life.memory is not None)
        evidence, pid, is_open = life.tether
        if is_open:
            assert (row.evidence == "process") == evidence
            assert row.pid == pid

    def check_memory(self, opened: int, closed: int) -> None:
        """Opened is closed, live, condemned and stuck; each is closed once at most."""
        cached = [life for life in self.history.lives if life.memory is not None]
        done = sum(life.released for life in cached) + self.history.ghosts_released
        assert closed == done, f"{closed} were closed, and {done} releases reported"
        assert opened >= len(cached) + self.history.ghosts_released

    def check_quiet(self, opened: int, closed: int) -> None:
        """Nothing is on its way: every request that was read has its one reply, and what ended is released."""
        assert not self.requests.asks, f"unanswered: {list(self.requests.asks.values())}"
        assert self.requests.read == self.requests.answered
        for life in self.history.lives:
            assert life.end is None or life.released or life.stuck, f"{life} was never released"
            assert not life.borrows
        held = sum(life.memory is not None and not life.released for life in self.history.lives)
        assert held <= opened - closed <= held + self.history.ghosts_stuck
