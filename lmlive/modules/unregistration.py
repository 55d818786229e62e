"""UNREGISTER: how an instance takes its leave.

It ends the secret, whatever stands under it, and is answered when all memory is released, or after a while with
``ReleasePending``. A secret speaks for one worker: where the header names nobody who is live, the secret tells who.

Loop thread only.
"""

from collections.abc import Callable

from lmlive.errors import ReleasePending
from lmlive.modules.books import Books
from lmlive.modules.call import Call
from lmlive.modules.handler import HandlerTable, Work
from lmlive.modules.management import hash_secret
from lmlive.modules.removal import remove
from lmlive.protocol.messages import Unregister
from lmlive.protocol.verbs import Verb

RELEASE_PATIENCE = 2.5
"""Seconds for which UNREGISTER waits for the release before it says that it is pending."""


def admit_unregister(books: Books, call: Call) -> Work | None:
    """End a secret and its registration; answer once all memory of the instance is released."""
    secret_hash = hash_secret(call.body(Unregister).secret)
    instance_id = call.header.instance_id
    named = books.roster.get(instance_id) is not None
    if not named:
        instance_id = _instance_of(books, secret_hash) or instance_id
    live = books.roster.get(instance_id)
    if not named and live is not None and live.secret_hash != secret_hash:
        # Another owner came since; what is left of this secret there is memory that is not released yet.
        books.roster.end_secret(secret_hash)
    else:
        removal = books.roster.unregister(instance_id, secret_hash, call.moment)
        if removal is not None:
            remove(books, removal)
    books.end_owner(secret_hash)
    tether = books.tethers.get(secret_hash)
    if tether is not None:
        tether.table.close()
    farewell = _Farewell(books, call)
    for entry in books.entries.unreleased(instance_id):
        if entry.registration.secret_hash == secret_hash:
            entry.waiters.append(farewell.expect())
    opening = books.openings.get(instance_id)
    if opening is not None and opening.secret_hash == secret_hash:
        opening.waiters.append(farewell.expect())
    farewell.begin()
    return None


def _instance_of(books: Books, secret_hash: bytes) -> int:
    """Find whom a secret speaks for, where the header names nobody who is live; 0 for nobody."""
    for registration in books.roster.snapshot():
        if registration.secret_hash == secret_hash:
            return registration.instance_id
    for instance_id, opening in books.openings.items():
        if opening.secret_hash == secret_hash:
            return instance_id
    for entry in books.entries.gone:
        if entry.registration.secret_hash == secret_hash:
            return entry.instance_id
    return 0


class _Farewell:
    """Answers one UNREGISTER when all it waits for has come, or when its patience ends."""

    def __init__(self, books: Books, call: Call) -> None:
        self._books = books
        self._call = call
        self._missing = 0
        self._cancel = _nothing

    def expect(self) -> Callable[[], None]:
        """Wait for one more release."""
        self._missing += 1
        return self._arrived

    def begin(self) -> None:
        """Answer at once if there is nothing to wait for."""
        if not self._missing:
            self._call.reply([True])
            return
        self._call.defer()
        self._cancel = self._books.later(RELEASE_PATIENCE, self._give_up)

    def _arrived(self) -> None:
        self._missing -= 1
        if not self._missing and not self._call.answered:
            self._cancel()
            self._call.reply([True])

    def _give_up(self) -> None:
        if not self._call.answered:
            self._call.fail(
                ReleasePending(
                    "the memory is still in use here: keep it until a later answer says True, or until you exit",
                    pending=self._missing,
                )
            )


def _nothing() -> None:
    """Cancel nothing."""


HANDLERS: HandlerTable = {Verb.UNREGISTER: admit_unregister}
