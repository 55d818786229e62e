"""A reaper over books, whose ticks and whose door's queue a test makes."""

from lmlive.liveness.target import InstanceLivenessTarget
from lmlive.server.reaper import Reaper
from tests.modules.registry import Registry


class Door:
    """A router whose queue is as a test says."""

    def __init__(self) -> None:
        self.caught_up = True

    def take_caught_up(self) -> bool:
        return self.caught_up


class Watchman:
    """A reaper whose ticks a test makes."""

    def __init__(self, targets: tuple[InstanceLivenessTarget, ...] = ()) -> None:
        self.registry = Registry(targets)
        self.books = self.registry.books
        self.door = Door()
        self.sweeps = 0
        self.reaper = Reaper(self.books, self.door, self._sweep)

    def _sweep(self) -> None:
        self.sweeps += 1

    def pass_time(self, seconds: float, *, step: float = 1.0) -> None:
        """Tick regularly for so long."""
        for _ in range(round(seconds / step)):
            self.registry.clock.advance(step)
            self.reaper.tick()

    def stall(self, seconds: float) -> None:
        """Tick once, late."""
        self.registry.clock.advance(seconds)
        self.reaper.tick()

    def ping(self, instance_id: int = 7) -> None:
        generation = self.books.roster.generation_of(instance_id)
        self.books.roster.touch(instance_id, generation, self.books.moment(), prove=True)

    @property
    def tracked(self) -> int:
        return self.books.roster.tracked

    def last_event(self) -> dict[str, object]:
        return self.books.events.after(0, 1000)[-1]
