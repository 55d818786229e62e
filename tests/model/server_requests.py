"""What the oracle of a whole server knows of requests: what each one does when it is read, and how it is answered.

What a request does, it does when it is read; what its reply may say is settled then, but for what may happen to its
worker meanwhile.
"""

from typing import Any

from lmlive import errors
from lmlive.protocol.codec import Header, decode_body, decode_header
from lmlive.protocol.verbs import TOUCHING, Verb
from tests.model.server_history import History
from tests.model.server_lives import Ask, Life

PATIENCE = 2.5
GONE = (errors.UnknownInstance, errors.StaleGeneration)
"""What a transfer hears whose worker left while it ran."""


class Requests:
    """Requests on their way, and what may be said to them."""

    def __init__(self, history: History, epoch: int) -> None:
        self.history = history
        self.hours = history.hours
        self.pool = history.pool
        self.epoch = epoch
        self.asks = history.asks
        self.hellos: dict[bytes, bytes] = {}
        self.read = self.answered = 0
        self.let_go_of: list[Life] = []
        self.freed: set[bytes] = set()
        """Secrets that were told that nothing of theirs is mapped: for ever, because no secret comes back."""
        self.open_fails = False
        self.told: list[int] = []
        self.to_tell: list[int] = []

    # As they are read

    def on_frame(self, peer: bytes, frame: bytes) -> None:
        header = decode_header(frame)
        key = (peer, header.request_id)
        assert key not in self.asks
        self.read += 1
        live = self.history.live(header.instance_id)
        ask = self.asks[key] = Ask(header.code, header, self.hours.now, draining=self.history.draining)
        ask.generation = live.generation if live is not None else 0
        if (
            header.code in TOUCHING
            and header.epoch == self.epoch
            and live is not None
            and live.generation == header.generation
        ):
            self.history.sign(live, "ping" if header.code == Verb.PING else "traffic")
        if header.code == Verb.PING and header.instance_id:
            self.to_tell.append(header.instance_id)
        payload = decode_body(frame)
        if not payload:  # an illegible body
            ask.refusals = (errors.InvalidPayload,)
            if self.history.draining and header.code in (Verb.STORE, Verb.RETRIEVE, Verb.REGISTER):
                ask.refusals = (errors.ServerDraining,)
            return
        match header.code:
            case Verb.HELLO:
                self.hellos[peer] = payload[4]  # type: ignore[assignment]
            case Verb.REGISTER:
                ask.secret, ask.memory = self.history.said[str(payload[1])]
            case Verb.UNREGISTER:
                self.unregister(ask, payload[0])  # type: ignore[arg-type]
            case Verb.REAP:
                victim = self.history.live(payload[0])  # type: ignore[arg-type]
                ask.refusals = ()
                if victim is not None and payload[1] in (None, victim.generation):
                    ask.life = victim
                    self.history.owe(victim, "requested")
            case Verb.STORE | Verb.RETRIEVE:
                self.transfer(ask, peer, live, payload)
            case Verb.LOOKUP | Verb.RELEASE:
                self.lease(ask, peer, payload)

    def on_taken(self) -> None:
        assert self.told == self.to_tell, "each PING with an id is told to the targets, and nothing else"
        self.told.clear()
        self.to_tell.clear()

    def lease(self, ask: Ask, peer: bytes, payload: list[Any]) -> None:
        ask.secret = self.hellos.get(peer, b"")
        running = self.hours.present_moment.running
        if self.history.draining and ask.verb == Verb.LOOKUP:
            ask.refusals = (errors.ServerDraining,)
        elif not ask.secret or ask.header.epoch != self.epoch:
            ask.refusals = (errors.StaleEpoch,)
        elif ask.verb == Verb.RELEASE:
            self.pool.release(ask, payload[0], running)
        else:
            model, _, _, key, lease = payload
            living = self.history.living.values()
            has_worker = any(life.memory is not None and self.model(life) == model for life in living)
            self.pool.look_up(ask, (model, key), lease, running, has_worker=has_worker)
            if ask.chunk is not None and not ask.lease and ask.secret in self.history.ended_secrets:
                # It was read after its owner's end: nobody would give that lease back.
                ask.refusals = (errors.UnknownInstance,)

    def model(self, life: Life) -> str:
        """Give the name under which a life's memory was registered."""
        return next(name for name, said in self.history.said.items() if said == (life.secret, life.memory))

    def unregister(self, ask: Ask, secret: bytes) -> None:
        ask.secret = secret
        live = self.history.live(ask.header.instance_id) or self.history.live_of(secret)
        if live is not None and live.secret != secret:
            ask.refusals = (errors.NotOwner,)
            return
        self.history.end_secret(secret)
        if live is not None:
            self.history.owe(live, "unregistered")

    def transfer(self, ask: Ask, peer: bytes, live: Life | None, payload: list[Any]) -> None:
        secret = self.hellos.get(peer)
        refusal: type[Exception] | None = None
        if self.history.draining:
            refusal = errors.ServerDraining
        elif secret is None:
            refusal = errors.StaleEpoch
        elif live is not None and live.secret != secret:
            refusal = errors.NotOwner
        elif ask.header.epoch != self.epoch:
            refusal = errors.StaleEpoch
        elif live is None:
            refusal = errors.UnknownInstance
        elif live.generation != ask.header.generation:
            refusal = errors.StaleGeneration
        elif live.memory is None:
            refusal = errors.InvalidLayout
        if refusal is not None:
            ask.refusals = (refusal,)
        elif live is not None:
            ask.life = live
            ask.chunk = (self.model(live), payload[0])
            ask.copies = True
            if ask.verb == Verb.RETRIEVE:
                self.pool.retrieve(ask, ask.chunk, payload[3], self.hours.present_moment.running)
            live.borrows += ask.copies

    # As they are answered

    def on_reply(self, peer: bytes, frame: bytes) -> None:
        header = decode_header(frame)
        ask = self.asks.pop((peer, header.request_id), None)
        assert ask is not None, "answered twice, or unasked"
        self.answered += 1
        assert header.epoch == self.epoch
        body = decode_body(frame)
        error = type(errors.from_wire(header.code, *body)) if header.code else None  # type: ignore[arg-type]
        assert error is not errors.InternalError, body
        life = ask.life
        if ask.verb in (Verb.STORE, Verb.RETRIEVE) and life is not None:
            life.borrows -= ask.copies
            # It may have waited for a thread when the lanes closed.
            ended = (errors.ServerDraining,) if self.history.draining else ()
            if life.end is not None:
                ask.refusals = (*GONE, *ended)
            elif ask.copies:
                self.history.sign(life, "traffic")
                if error is not None:
                    ask.refusals = ended
        if ask.refusals:
            assert error in ask.refusals, f"{Verb(ask.verb).name} was answered with {error}, not {ask.refusals}"
            return
        match ask.verb:
            case Verb.PING:
                assert error is None
                assert header.generation == ask.generation
            case Verb.REGISTER:
                self.check_register(ask, header, error)
            case Verb.UNREGISTER:
                self.check_unregister(ask, error)
            case Verb.REAP:
                assert body == [life is not None]
            case Verb.STORE:
                assert error is None, body
                assert life is not None
                self.pool.check_store(ask, body, life)
            case Verb.LOOKUP:
                assert error is None, body
                self.pool.check_look_up(ask, body, ask.secret, self.hours.present_moment.running)
            case Verb.RETRIEVE | Verb.RELEASE:
                assert error is None, body
                assert body == ask.wanted, f"{body}, not {ask.wanted}"
            case _:
                assert error is None, body

    def check_register(self, ask: Ask, header: Header, error: type[Exception] | None) -> None:
        live = self.history.live(ask.header.instance_id)
        if error is errors.UnknownInstance:
            assert ask.secret in self.history.ended_secrets
        elif error is errors.NotOwner:
            assert live is not None
            assert live.secret != ask.secret
        elif error is errors.ServerDraining:
            assert self.history.draining
        elif error is errors.InvalidHandle:
            assert ask.memory is not None
        elif error is errors.HandleOpenError:
            assert self.open_fails
        else:
            assert error is None, error
            assert live is not None, "registered, and nobody is live"
            assert (live.secret, live.memory) == (ask.secret, ask.memory)
            assert header.generation == live.generation
            if live.since != self.hours.present_moment:
                self.history.sign(live, "refresh")
                self.history.tie(live)

    def check_unregister(self, ask: Ask, error: type[Exception] | None) -> None:
        left = [life for life in self.history.lives if life.secret == ask.secret and life.end and not life.released]
        if error is errors.ReleasePending:
            assert self.hours.now >= ask.at + PATIENCE, "impatient"
        elif error is not None:
            assert error is errors.ServerDraining, error
            assert self.history.draining
        else:
            self.let_go_of += left  # told a moment before the release is written down
            self.freed.add(ask.secret)
