"""REGISTER: how an instance comes.

Opening handles may take seconds, so REGISTER has all three phases. Between admit and settle nothing is promised: the
registration is made in settle, and only if the server still serves, the secret still stands and the process still
lives; else what was opened is released. The same REGISTER repeated meanwhile joins the first one; a different one waits
for its turn.

Loop thread only; the handles are opened in the register lane.
"""

import logging
from dataclasses import replace
from functools import partial

from lmlive.cache.keys import Namespace
from lmlive.cache.layout import KVLayout
from lmlive.device.context import CacheContext
from lmlive.errors import (
    InternalError,
    InvalidHandle,
    LMLiveError,
    ServerBusy,
    ServerDraining,
)
from lmlive.liveness.evidence import Evidence
from lmlive.liveness.roster import Facts, Outcome, Registration
from lmlive.modules.books import Books, Opening
from lmlive.modules.call import Call
from lmlive.modules.channels import note_channel
from lmlive.modules.entries import ContextEntry
from lmlive.modules.events import note
from lmlive.modules.handler import HandlerTable, Lane, Work
from lmlive.modules.handles import Opener, check_pool, fingerprint, places, read_layout, take_sources
from lmlive.modules.management import hash_secret
from lmlive.modules.removal import remove
from lmlive.modules.tethers import TetherRecord
from lmlive.protocol.messages import Register, RegisterReply
from lmlive.protocol.verbs import Verb

log = logging.getLogger("lmlive.server")

OPENINGS_PER_THREAD = 16
"""How many REGISTERs may be on their way for each thread of the lane, before the next one is told to come again."""

_RETRY_AFTER = 0.5


def admit_register(books: Books, call: Call) -> Work | None:
    """Refresh, join, wait, or open the handles: those that the tether had brought when the REGISTER came."""
    message = call.body(Register)
    tether = books.tethers.get(hash_secret(message.secret))
    layout = read_layout(books, message)
    facts = _read_facts(call, message, tether)
    if call.fingerprint not in {b"", facts.fingerprint}:
        raise InvalidHandle("other descriptors came while this REGISTER waited its turn: send the table again")
    call.fingerprint = facts.fingerprint
    outcome = books.roster.would(facts)
    note_channel(books, call.source, facts.instance_id)
    opening = books.openings.get(facts.instance_id)
    if opening is not None:
        same = opening.secret_hash == facts.secret_hash and opening.fingerprint == facts.fingerprint
        (opening.joined if same else opening.followers).append(call)
        call.defer()
        if same and tether is not None:
            tether.table.close()
        return None
    copies_itself = message.mode == "engine_driven"
    if copies_itself:
        check_pool(message, tether)
    if outcome is Outcome.REFRESHED or layout is None or copies_itself:
        if tether is not None:
            tether.table.close()
        registration = _enroll(books, call, facts)
        if outcome is not Outcome.REFRESHED:
            entry = ContextEntry(registration)
            if layout is not None:
                entry.layout, entry.namespace, entry.strategy = layout, _namespace(facts, layout), message.strategy
            books.entries.install(entry)
        call.reply(_answer(books, layout))
        return None
    if len(books.openings) >= OPENINGS_PER_THREAD * books.config.register_threads:
        raise ServerBusy("too many workers register at once: come again", retry_after=_RETRY_AFTER)
    opener = Opener(books.backend, take_sources(message, tether), places(layout))
    opening = Opening(facts.secret_hash, facts.fingerprint, joined=[call])
    books.openings[facts.instance_id] = opening
    return Work(
        Lane.REGISTER, opener.run, partial(_settle_register, books, opening, opener, facts, layout), facts.instance_id
    )


def _settle_register(  # noqa: PLR0917 - all but the last two are bound by admit
    books: Books,
    opening: Opening,
    opener: Opener,
    facts: Facts,
    layout: KVLayout,
    result: object | None,
    error: BaseException | None,
) -> None:
    """Install what was opened, or release it; then answer everyone who asked for it."""
    del books.openings[facts.instance_id]
    books.discard(opener.take_unused())
    context = result if isinstance(result, CacheContext) else None
    refusal = error or _install(books, opening, facts, layout, context)
    if refusal is not None and not isinstance(refusal, LMLiveError):
        log.error("register failed instance_id=%d", facts.instance_id, exc_info=refusal)
    if refusal is not None and context is not None:
        ghost = ContextEntry(Registration(facts, 0, books.moment()), context)
        ghost.waiters, opening.waiters = opening.waiters, []
        books.entries.discard(ghost)
    for waiter in opening.waiters:
        waiter()
    for call in opening.joined:
        if refusal is None:
            call.reply(_answer(books, layout))
        else:
            call.fail(refusal)
    for call in opening.followers:
        books.readmit(call)


def _install(
    books: Books, opening: Opening, facts: Facts, layout: KVLayout, context: CacheContext | None
) -> Exception | None:
    """Make it live, if nothing speaks against it by now; else give what does."""
    if context is None:
        return InternalError("the register lane opened nothing")
    if books.state != "serving":
        return ServerDraining("the server began to drain meanwhile, nothing was registered: wait for its successor")
    facts = _with_evidence(facts, books.tethers.get(facts.secret_hash))
    try:
        registration = _enroll(books, opening.joined[0], facts, mapped_bytes=context.mapped_bytes)
    except Exception as error:  # noqa: BLE001 - whoever joined must hear of it, whatever it is
        return error
    books.entries.install(ContextEntry(registration, context, layout, _namespace(facts, layout)))
    return None


def _namespace(facts: Facts, layout: KVLayout) -> Namespace:
    return Namespace(facts.model, facts.revision, layout.layout_key, facts.rank, facts.world_size)


def _enroll(books: Books, call: Call, facts: Facts, *, mapped_bytes: int = 0) -> Registration:
    """Write into the roster; what is superseded leaves before its successor is installed."""
    registered = books.roster.register(facts, books.moment())
    books.connections.note_register(call.peer)
    if registered.removal is not None:
        remove(books, registered.removal)
    registration = registered.registration
    if registered.outcome is not Outcome.REFRESHED:
        known: dict[str, object] = {
            "instance_id": str(registration.instance_id),
            "generation": registration.generation,
            "model": registration.model,
            "rank": registration.rank,
            "host": registration.host,
            "pid": registration.pid,
            "mode": registration.mode,
            "evidence": registration.evidence.value,
            "mapped_bytes": mapped_bytes,
        }
        said = call.connection
        note(log, logging.INFO, "registered", known | {"software": said.software if said is not None else None})
        books.emit("registered", **known)
    return registration


def _answer(books: Books, layout: KVLayout | None) -> list[object]:
    key = b"" if layout is None else layout.layout_key
    return RegisterReply(beat=books.policy.beat, layout_key=key).to_payload()


def _read_facts(call: Call, message: Register, tether: TetherRecord | None) -> Facts:
    instance_id = call.header.instance_id
    facts = Facts(
        instance_id=instance_id,
        secret_hash=hash_secret(message.secret),
        fingerprint=fingerprint(message, tether),
        model=message.model,
        revision=message.revision,
        rank=message.rank,
        world_size=message.world_size,
        mode=message.mode if message.groups else "none",
        host=None if call.source is None else call.source.host,
        connection=None if call.source is None else call.source.connection,
    )
    return _with_evidence(facts, tether)


def _with_evidence(facts: Facts, tether: TetherRecord | None) -> Facts:
    """Say what the kernel knows of the process, if its tether speaks for this instance."""
    if tether is None or tether.instance_id != facts.instance_id:
        return replace(facts, evidence=Evidence.NONE, pid=None, tether_open=False)
    return replace(facts, evidence=tether.evidence, pid=tether.pid, tether_open=tether.open)


HANDLERS: HandlerTable = {Verb.REGISTER: admit_register}
