import os
from pathlib import Path

import pytest

from lmlive.errors import (
    HandleOpenError,
    InvalidHandle,
    InvalidLayout,
    InvalidPayload,
    NotOwner,
    ReleasePending,
    ServerBusy,
    ServerDraining,
    UnknownInstance,
)
from lmlive.liveness.evidence import Evidence
from lmlive.modules.handler import Lane
from lmlive.modules.registration import OPENINGS_PER_THREAD
from lmlive.modules.tethers import close_all
from lmlive.protocol.messages import CudaHandle, Group, Plane, RegisterReply
from tests.modules.registry import BARE, BLOCK, NBYTES, OTHER, RUN, Registry, fd_handle, register


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_registration_opens_its_handles_in_the_lane_and_is_installed_after() -> None:
    registry = Registry()
    registry.tether()
    asked = registry.register()
    assert asked.work is not None
    assert (asked.work.lane, asked.work.key) == (Lane.REGISTER, 7)
    assert registry.backend.opened == 0
    assert registry.books.roster.tracked == 0
    asked.run()
    assert isinstance(asked.answer, list)
    reply = RegisterReply.from_payload(asked.answer)
    entry = registry.books.entries.find(7)
    assert entry is not None
    assert entry.layout is not None
    assert reply == RegisterReply(beat=10.0, layout_key=entry.layout.layout_key)
    assert entry.namespace == ("m", "", reply.layout_key, 0, 1)
    assert entry.mapped_bytes == NBYTES
    live = registry.books.roster.get(7)
    assert live is not None
    assert (live.evidence, live.pid, live.tether_open, live.mode) == (Evidence.PROCESS, 41, True, "server_driven")
    assert registry.kinds() == ["registered"]


def test_a_worker_without_a_cache_registers_at_once() -> None:
    registry = Registry()
    assert registry.register(**BARE).answer == [10.0, b""]
    live = registry.books.roster.get(7)
    assert live is not None
    assert (live.mode, live.evidence, live.pid) == ("none", Evidence.NONE, None)
    entry = registry.books.entries.find(7)
    assert entry is not None
    assert entry.context is None


def test_the_same_memory_again_is_a_refresh() -> None:
    registry = Registry()
    record = registry.tether(2)
    registry.register().run()
    before = descriptors()
    registry.pass_time(1.0)
    again = registry.register()
    assert again.work is None
    assert isinstance(again.answer, list)
    live = registry.books.roster.get(7)
    assert live is not None
    assert live.generation == 1
    assert live.last_seen.running == 1.0
    assert registry.backend.opened == 1
    assert record.table.held == 0
    assert descriptors() == before
    assert registry.kinds() == ["registered"]


def test_other_memory_supersedes_and_the_old_one_leaves_first() -> None:
    registry = Registry()
    first = registry.registered()
    registry.books.entries.borrow(first.generation)
    registry.tether()
    asked = registry.register().run()
    assert isinstance(asked.answer, list)
    assert registry.kinds() == ["registered", "removed", "registered"]
    second = registry.books.entries.find(7)
    assert second is not None
    assert (first.generation, second.generation) == (1, 2)
    assert not first.live
    registry.books.give_back(first)
    assert registry.release_all() == 1
    assert [mapping.number for mapping in registry.backend.still_open] == [2]


def test_another_model_over_the_same_memory_supersedes_too() -> None:
    registry = Registry()
    registry.register(**BARE)
    registry.register(**BARE, model="n")
    assert registry.books.roster.generation_of(7) == 2


def test_another_secret_owns_nothing() -> None:
    registry = Registry()
    registry.registered()
    record = registry.tether(secret=OTHER)
    refused = registry.register(secret=OTHER)
    assert isinstance(refused.answer, NotOwner)
    assert isinstance(registry.unregister(secret=OTHER).answer, NotOwner)
    assert registry.books.roster.generation_of(7) == 1
    record.table.close()


def test_the_same_request_joins_the_opening_that_runs() -> None:
    registry = Registry()
    record = registry.tether()
    first = registry.register()
    second = registry.register()
    assert second.work is None
    assert second.answer is None
    first.run()
    assert first.answer == second.answer
    assert registry.backend.opened == 1
    assert record.table.held == 0


def test_a_different_request_waits_for_the_opening_that_runs() -> None:
    registry = Registry()
    registry.tether()
    first = registry.register()
    registry.tether()
    second = registry.register()
    stranger = registry.register(**BARE, secret=OTHER)
    assert (second.answer, stranger.answer) == (None, None)
    first.run()
    assert registry.readmitted == [second.call, stranger.call]
    second.start(registry.books).run()
    stranger.start(registry.books)
    assert registry.books.roster.generation_of(7) == 2
    assert isinstance(stranger.answer, NotOwner)


def test_who_waited_its_turn_does_not_get_the_memory_of_a_later_table() -> None:
    registry = Registry()
    registry.tether()
    first = registry.register()
    waited_for = registry.tether()
    second = registry.register()
    waited_for.table.close()  # as a later table does
    later = registry.tether()
    first.run()
    second.start(registry.books)
    assert second.work is None
    assert isinstance(second.answer, InvalidHandle)
    assert later.table.held == 1
    third = registry.register().run()
    assert isinstance(third.answer, list)
    assert registry.books.roster.generation_of(7) == 2


def test_a_failure_to_open_is_everybodys_answer_and_leaves_nothing() -> None:
    registry = Registry()
    before = descriptors()
    registry.tether()
    registry.backend.fail("open", HandleOpenError("no room"))
    first, second = registry.register(), registry.register()
    first.run()
    assert isinstance(first.answer, HandleOpenError)
    assert second.answer is first.answer
    assert registry.books.roster.tracked == 0
    assert not registry.books.openings
    assert descriptors() == before


def test_a_lane_that_never_ran_gives_the_descriptors_back() -> None:
    registry = Registry()
    before = descriptors()
    registry.tether()
    asked = registry.register()
    assert asked.work is not None
    asked.work.settle(None, ServerDraining("closing"))
    assert isinstance(asked.answer, ServerDraining)
    assert descriptors() == before


@pytest.mark.parametrize("meanwhile", ["drain", "end secret", "owner changes"])
def test_what_was_opened_for_nothing_is_released(meanwhile: str) -> None:
    registry = Registry()
    registry.tether()
    asked = registry.register()
    if meanwhile == "drain":
        registry.books.state = "draining"
    elif meanwhile == "end secret":
        registry.books.roster.end_secret(registry.books.openings[7].secret_hash)
    else:
        opening = registry.books.openings.pop(7)
        registry.register(**BARE, secret=OTHER)
        registry.books.openings[7] = opening
    asked.run()
    expected = {"drain": ServerDraining, "end secret": UnknownInstance, "owner changes": NotOwner}
    assert isinstance(asked.answer, expected[meanwhile])
    assert registry.release_all() == 1
    assert registry.backend.closed == registry.backend.opened == 1


def test_a_tether_that_closed_meanwhile_gives_no_hold() -> None:
    registry = Registry()
    record = registry.tether()
    asked = registry.register()
    record.open = False
    asked.run()
    live = registry.books.roster.get(7)
    assert live is not None
    assert not live.shown_alive
    assert live.evidence is Evidence.PROCESS


def test_a_tether_of_another_instance_says_nothing_about_this_one() -> None:
    registry = Registry()
    registry.tether(instance_id=8)
    registry.register().run()
    live = registry.books.roster.get(7)
    assert live is not None
    assert (live.evidence, live.pid) == (Evidence.NONE, None)


def test_too_many_openings_at_once_are_told_to_come_again() -> None:
    registry = Registry(register_threads=1)
    waiting = []
    for number in range(101, 101 + OPENINGS_PER_THREAD):
        registry.tether(instance_id=number, secret=bytes([number]) * 16)
        waiting.append(registry.register(number, secret=bytes([number]) * 16))
    record = registry.tether()
    refused = registry.register()
    assert isinstance(refused.answer, ServerBusy)
    assert refused.answer.retry_after > 0
    assert record.table.held == 1
    assert registry.register(99, **BARE, secret=OTHER).answer == [10.0, b""]
    for asked in waiting:
        asked.run()
    assert isinstance(registry.register().run().answer, list)


def test_descriptors_must_have_come_and_serve_once() -> None:
    registry = Registry()
    assert isinstance(registry.register().answer, InvalidHandle)
    record = registry.tether()
    assert isinstance(registry.register(handles=(fd_handle(3),)).answer, InvalidHandle)
    twice = register(handles=(fd_handle(0), fd_handle(0)))
    assert isinstance(registry.register(handles=twice.handles).answer, InvalidHandle)
    assert record.table.held == 1
    registry.register().run()
    other = registry.register(model="n")
    assert isinstance(other.answer, InvalidHandle)
    assert "send the table again" in str(other.answer)


def test_a_worker_that_copies_by_itself_brings_its_layout_and_its_strategy_alone() -> None:
    registry = Registry()
    record = registry.tether()
    wrong = registry.register(mode="engine_driven", handles=(), strategy="auto").answer
    assert isinstance(wrong, InvalidLayout)
    assert wrong.field == "strategy"
    assert isinstance(registry.register(mode="engine_driven", handles=(), strategy="shm").answer, InvalidHandle)
    record.has_pool = True
    assert not isinstance(registry.register(mode="engine_driven", handles=(), strategy="shm").answer, BaseException)
    [entry] = registry.books.entries
    assert (entry.strategy, entry.context, entry.registration.mode) == ("shm", None, "engine_driven")
    assert registry.register(mode="engine_driven", handles=(), strategy="shm").work is None
    assert registry.books.entries.find(7) is entry
    registry.register(mode="engine_driven", handles=(), strategy="inline")
    successor = registry.books.entries.find(7)
    assert successor is not None
    assert (successor.strategy, successor.generation) == ("inline", entry.generation + 1)
    last = registry.registered()
    assert (last.strategy, last.registration.mode) == ("", "server_driven")


def test_what_cannot_be_served_names_field_and_reason() -> None:
    registry = Registry()
    record = registry.tether()
    engine_driven = registry.register(mode="engine_driven").answer
    assert isinstance(engine_driven, InvalidLayout)
    assert engine_driven.field == "handles"
    odd = Plane(handle=0, offset=0, stride=RUN, run=RUN, in_block_shape=(BLOCK,), stride_order=(0,))
    uneven = registry.register(groups=(Group(24, 8, (odd,)),)).answer
    assert isinstance(uneven, InvalidLayout)
    assert uneven.field == "block_tokens"
    assert isinstance(registry.register(handles=(fd_handle(0, NBYTES - 1),)).answer, InvalidHandle)
    assert isinstance(registry.register(handles=(CudaHandle(bytes(64), "GPU-0", NBYTES),)).answer, InvalidHandle)
    assert isinstance(registry.register(groups=()).answer, InvalidPayload)
    assert isinstance(registry.register(mode="none").answer, InvalidLayout)
    assert isinstance(registry.register(0, **BARE).answer, InvalidPayload)
    assert isinstance(registry.register(2**63, **BARE).answer, InvalidPayload)
    record.table.close()


def test_unregister_is_answered_after_the_release() -> None:
    registry = Registry()
    registry.registered()
    asked = registry.unregister()
    assert asked.answer is None
    assert registry.books.roster.tracked == 0
    registry.release_all()
    assert asked.answer == [True]
    assert not registry.timers


def test_unregister_of_somebody_unknown_is_true_and_ends_the_secret() -> None:
    registry = Registry()
    assert registry.unregister().answer == [True]
    refused = registry.register(**BARE)
    assert isinstance(refused.answer, UnknownInstance)


def test_unregister_says_pending_while_a_copy_runs_and_true_to_a_later_one() -> None:
    registry = Registry()
    entry = registry.registered()
    registry.books.entries.borrow(entry.generation)
    first = registry.unregister()
    registry.pass_time(2.4)
    assert first.answer is None
    registry.pass_time(0.2)
    assert isinstance(first.answer, ReleasePending)
    second = registry.unregister()
    assert second.answer is None
    registry.books.give_back(entry)
    registry.release_all()
    assert second.answer == [True]
    registry.pass_time(5.0)


def test_unregister_finds_its_instance_by_the_secret() -> None:
    registry = Registry()
    registry.register(**BARE)
    assert registry.unregister(0).answer is None
    registry.release_all()
    assert registry.books.roster.tracked == 0


@pytest.mark.parametrize("named", [999, 8])
def test_unregister_under_an_id_that_is_not_live_ends_the_instance_of_its_secret(named: int) -> None:
    registry = Registry()
    ghost = registry.registered(8, secret=OTHER)
    registry.books.entries.borrow(ghost.generation)
    registry.unregister(8, OTHER)
    registry.registered()
    asked = registry.unregister(named)
    assert registry.books.roster.tracked == 0
    assert asked.answer is None
    registry.release_all()
    assert asked.answer == [True]
    registry.books.give_back(ghost)
    registry.release_all()


def test_unregister_by_secret_alone_asks_about_its_own_memory_though_the_instance_has_another_owner() -> None:
    registry = Registry()
    ghost = registry.registered()
    registry.books.entries.borrow(ghost.generation)
    registry.unregister()
    registry.registered(secret=OTHER)
    asked = registry.unregister(0)
    assert asked.answer is None
    assert registry.books.roster.tracked == 1
    assert isinstance(registry.unregister().answer, NotOwner), "who names another's instance is told so"
    registry.books.give_back(ghost)
    registry.release_all()
    assert asked.answer == [True]
    assert registry.books.roster.tracked == 1


def test_unregister_under_an_unknown_id_ends_an_opening_of_its_secret() -> None:
    registry = Registry()
    registry.tether()
    opening = registry.register()
    asked = registry.unregister(999)
    opening.run()
    assert isinstance(opening.answer, UnknownInstance)
    registry.release_all()
    assert asked.answer == [True]


def test_descriptors_that_nobody_will_open_are_closed_elsewhere() -> None:
    registry = Registry()
    given_up: list[int] = []
    registry.books.discard = given_up.extend
    registry.tether()
    asked = registry.register()
    assert asked.work is not None
    asked.work.settle(None, ServerDraining("closing"))
    record = registry.tether(2)
    record.table.waiting.discard = given_up.extend
    assert isinstance(registry.register(handles=(fd_handle(), fd_handle(5))).answer, InvalidHandle)
    registry.unregister()
    assert len(given_up) == 3
    assert record.table.held == 0
    close_all(given_up)


def test_unregister_ends_a_registration_that_is_still_opening() -> None:
    registry = Registry()
    registry.tether()
    opening = registry.register()
    asked = registry.unregister(0)
    assert asked.answer is None
    opening.run()
    assert isinstance(opening.answer, UnknownInstance)
    assert asked.answer is None
    registry.release_all()
    assert asked.answer == [True]
    assert registry.backend.closed == 1


def test_unregister_of_an_opening_that_fails_is_answered() -> None:
    registry = Registry()
    registry.tether()
    registry.backend.fail("open", HandleOpenError("no room"))
    opening = registry.register()
    asked = registry.unregister()
    opening.run()
    assert asked.answer == [True]


def test_unregister_ends_the_secrets_leases_and_descriptors() -> None:
    registry = Registry()
    registry.registered()
    record = registry.tether(3)
    secret_hash = record.secret_hash
    registry.books.leases.open(secret_hash, {0: {}}, 0.0)
    registry.unregister()
    assert len(registry.books.leases) == 0
    assert record.table.held == 0
    registry.release_all()


def test_a_table_owns_each_descriptor_until_it_is_taken_or_closed() -> None:
    registry = Registry()
    record = registry.tether(2)
    fd = record.table.take(0)
    os.fstat(fd)
    os.close(fd)
    with pytest.raises(InvalidHandle):
        record.table.take(0)
    record.table.close()
    record.table.close()
    assert record.table.waiting.count == 0
