from lmlive.protocol import verbs
from lmlive.protocol.verbs import Verb


def test_numbers_are_what_they_always_were() -> None:
    names = (
        "HELLO PING REGISTER UNREGISTER STORE RETRIEVE LOOKUP RELEASE PREPARE_STORE COMMIT_STORE PREPARE_RETRIEVE "
        "CLEAR STATUS REAP EVENTS READ WRITE"
    )
    assert [verb.name for verb in Verb] == names.split()
    assert [int(verb) for verb in Verb] == list(range(1, 18))
    assert [(role.name, int(role)) for role in verbs.Role] == [("WORKER", 1), ("SCHEDULER", 2), ("TOOL", 3)]


def test_a_verb_is_fenced_in_one_way_at_most() -> None:
    assert not verbs.FENCED & verbs.FENCED_BY_EPOCH
    assert {Verb.PING} == verbs.TOUCHING - verbs.FENCED


def test_an_unknown_verb_is_named_by_its_number() -> None:
    assert verbs.verb_name(2) == "PING"
    assert verbs.verb_name(77) == "77"
