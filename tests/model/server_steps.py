"""What may befall a whole server and its workers, one step at a time; each is a rule of a state machine."""

from collections.abc import Mapping
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from lmlive.protocol.verbs import Verb
from tests.model.server_workers import Worker
from tests.model.server_world import POLICIES, World

# Faults lie deep: the common case is drawn far more often, so that an entry lives long enough to get there.
whom = st.sampled_from([0, 0, 0, 0, 2, 2, 1])
SCHEDULER = 3
memories = st.sampled_from([0, 0, 0, 0, 1, None])
rarely = st.sampled_from([False] * 5 + [True])
often = st.sampled_from([True] * 3 + [False])
times = st.sampled_from([0.25, 1.0, 10.0, 29.75, 60.0, 119.75, 120.0, 120.25, 150.0, 300.0, 390.0, 630.0, 1800.0])
beats = st.sampled_from([10.0, 30.0, 60.0, 119.75, 120.0])
pauses = st.sampled_from([1.25, 1.75, 5.0, 130.0, 700.0])


class Steps(RuleBasedStateMachine):
    patches: ClassVar[Mapping[str, object]] = {}
    counts: ClassVar[list[float]] = [0, 0.0]
    """How many schedules were run, and how much time was watched in them."""

    @initialize(policy=st.sampled_from([POLICIES[0]] * 4 + list(POLICIES[1:])), memory=memories, beats=often)
    def begin(self, policy: Any, memory: int | None, beats: bool) -> None:
        self.world = World(policy, self.patches)
        self.do_serve(0, memory, tied=True, beats=beats)

    def worker(self, number: int) -> Worker:
        return self.world.workers[number]

    def step(self, act: Any) -> None:
        async def run() -> None:
            act()

        self.world.run(run())
        self.world.check()

    # Registering

    def do_serve(self, number: int, memory: int | None, *, tied: bool, beats: bool) -> None:
        world, worker = self.world, self.worker(number)

        def act() -> None:
            world.connect(worker)
            worker.hello()
            if tied or memory is not None:
                world.tie(worker, memory)
            worker.register(memory)

        self.step(act)
        worker.beats = beats
        if beats:
            self.step(worker.ping)

    def replace_if_gone(self, number: int) -> None:
        """Let another process take the place of one that is gone."""
        worker = self.worker(number)
        if worker.killed or worker.secret in self.world.reign.oracle.history.ended_secrets:
            self.world.workers[number] = self.world.new_worker(worker.name, worker.instance)

    @rule(number=whom, memory=memories, tied=often, beats=often)
    def serve(self, number: int, memory: int | None, tied: bool, beats: bool) -> None:
        """Do what most workers do: connect, say who they are, register, and begin to ping."""
        self.replace_if_gone(number)
        self.do_serve(number, memory, tied=tied, beats=beats)

    @rule(number=whom, memory=memories, brings=often)
    def register(self, number: int, memory: int | None, brings: bool) -> None:
        world, worker = self.world, self.worker(number)

        def act() -> None:
            if brings:
                world.tie(worker, memory)
            worker.register(memory)

        self.step(act)

    @rule(number=whom, names_itself=often)
    def unregister(self, number: int, names_itself: bool) -> None:
        worker = self.worker(number)
        instance = worker.instance if names_itself else 0
        self.step(lambda: worker.send(Verb.UNREGISTER, [worker.secret], instance_id=instance))

    # Signs of life, and requests

    @rule(number=whom, back=st.sampled_from([0, 0, 0, 1]))
    def ping(self, number: int, back: int) -> None:
        worker = self.worker(number)
        self.step(lambda: worker.ping(generation=max(worker.generation - back, 0)))

    @rule(number=whom, beats=st.booleans())
    def beat(self, number: int, beats: bool) -> None:
        self.worker(number).beats = beats

    @rule(number=whom, fresh=often)
    def store(self, number: int, fresh: bool) -> None:
        self.step(lambda: self.worker(number).store(fresh=fresh))

    @rule(number=whom, of=whom, memory=st.sampled_from([0, 0, 1]))
    def look_up(self, number: int, of: int, memory: int) -> None:
        self.step(lambda: self.worker(number).look_up(self.worker(of), memory))

    @rule(number=whom, verb=st.sampled_from([Verb.STORE, Verb.RETRIEVE, Verb.REGISTER, Verb.REAP, Verb.PING]))
    def is_illegible(self, number: int, verb: Verb) -> None:
        """Let a worker send a body that nobody can read under a header that anybody can."""
        self.step(lambda: self.worker(number).send(verb, []))

    @rule(number=st.sampled_from([0, 1, 2, SCHEDULER]))
    def pings_for_nobody(self, number: int) -> None:
        self.step(lambda: self.worker(number).send(Verb.PING, [None], instance_id=0))

    # Ends

    @rule(number=whom, of=whom, closes_first=often, late=rarely, memory=memories)
    def kill(self, number: int, of: int, closes_first: bool, late: bool, memory: int | None) -> None:
        """Kill a process; what it had sent may be read only afterwards."""
        world, worker = self.world, self.worker(number)
        if worker.killed:
            return

        def act() -> None:
            if late:
                world.reign.router.pause()
                if worker.instance:
                    world.tie(worker, memory)
                    worker.register(memory)
                    worker.ping()
                    worker.store(fresh=True)
                worker.look_up(self.worker(of), 0)
            if closes_first:
                world.lose(worker)
            world.kill(worker)

        self.step(act)
        if late:
            self.step(world.reign.router.resume)

    @rule(number=whom)
    def stop(self, number: int) -> None:
        self.worker(number).stopped = True

    @rule(number=whom, memory=memories)
    def go_on(self, number: int, memory: int | None) -> None:
        """Let a worker wake up, and speak as if nothing had happened."""
        worker = self.worker(number)
        worker.stopped = False
        self.step(worker.ping)
        self.step(lambda: worker.store(fresh=True))

    @rule(number=whom, tether_too=st.booleans())
    def cut(self, number: int, tether_too: bool) -> None:
        def act() -> None:
            self.world.cut(self.worker(number))
            if tether_too:
                self.world.lose(self.worker(number))

        self.step(act)

    @rule(number=whom, tether_too=st.booleans())
    def heal(self, number: int, tether_too: bool) -> None:
        def act() -> None:
            self.world.connect(self.worker(number))
            self.worker(number).hello()
            if tether_too:
                self.world.tie(self.worker(number), None)

        self.step(act)

    @rule(number=whom, back=st.sampled_from([None, 0, 0, 1]))
    def operator_reaps(self, number: int, back: int | None) -> None:
        worker = self.worker(number)
        generation = None if back is None else max(worker.generation - back, 0)
        self.step(lambda: worker.send(Verb.REAP, [worker.instance, generation]))

    @rule(number=whom)
    def target_gives_up(self, number: int) -> None:
        self.world.reign.owner.stale.append(self.worker(number).instance)

    # Time

    @rule(seconds=times, beat=beats)
    def time_passes(self, seconds: float, beat: float) -> None:
        self.world.run(self.world.pass_time(seconds, beat))
        self.world.check()

    @rule(seconds=pauses, number=whom, sends=st.booleans())
    def stall(self, seconds: float, number: int, sends: bool) -> None:
        """Stop the server; what a worker sends meanwhile waits."""

        def act() -> None:
            self.world.stall(seconds)
            if sends:
                self.worker(number).ping()

        self.step(act)

    @rule(seconds=pauses)
    def machine_sleeps(self, seconds: float) -> None:
        self.step(lambda: self.world.sleep(seconds))

    # Hindrances

    @rule(what=st.sampled_from(["open", "close", "gather", "scatter"]))
    def hang(self, what: Any) -> None:
        self.step(lambda: self.world.reign.hang(what))

    @rule(what=st.sampled_from(["open", "close", "gather", "scatter"]))
    def let_go(self, what: Any) -> None:
        self.step(lambda: self.world.reign.let_go(what))

    @rule(what=st.sampled_from(["open", "close", "close"]), really=rarely)
    def fail(self, what: Any, really: bool) -> None:
        if really:
            self.step(lambda: self.world.reign.fail(what))

    @rule(really=rarely, lets_go=often)
    def restart(self, really: bool, lets_go: bool) -> None:
        """End the server and start its successor."""
        if not really:
            return
        world = self.world
        if lets_go:
            world.run(world.quiesce())
        world.succeed()
        world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            if self.world.sound:
                self.world.finish()
        finally:
            self.counts[0] += 1
            self.counts[1] += self.world.watched
            self.world.tear_down()
