"""The fence: a request that means another server, another instance or another life of it gets no further.

Loop thread only.
"""

from lmlive.errors import NotOwner, StaleEpoch, StaleGeneration, UnknownInstance
from lmlive.modules.books import Books
from lmlive.modules.call import Call
from lmlive.protocol.verbs import FENCED, FENCED_BY_EPOCH, Verb


def fence(books: Books, call: Call, verb: Verb) -> None:
    """Let through only what means this server, this instance and this generation.

    Raises:
        RequestError: The request means something else, or comes from somebody else.
    """
    whole = verb in FENCED
    if not whole and verb not in FENCED_BY_EPOCH:
        return
    header = call.header
    if call.connection is None:
        raise StaleEpoch("no HELLO on this connection: say it, then register again", hello=True)
    registered = books.roster.get(header.instance_id) if whole else None
    if registered is not None and registered.secret_hash != call.connection.secret_hash:
        raise NotOwner("this instance belongs to another worker", instance_id=header.instance_id)
    if header.epoch != books.epoch:
        raise StaleEpoch("another server answers here now: say HELLO and register again", epoch=books.epoch)
    if not whole:
        return
    if registered is None:
        raise UnknownInstance("not registered here (any more): register again", instance_id=header.instance_id)
    if registered.generation != header.generation:
        raise StaleGeneration("registered anew meanwhile: register again", generation=registered.generation)
