from hypothesis import given
from hypothesis import strategies as st

from lmlive.worker.cell import NOWHERE, Cell, Next, Standing

FIRST = Cell(7, 1)


def registered(cell: Cell = FIRST) -> Standing:
    standing = Standing()
    standing.joins()
    standing.joined(cell)
    return standing


def test_it_starts_healthy_and_registered_nowhere() -> None:
    standing = Standing()
    assert standing.healthy
    assert standing.cell == NOWHERE


def test_a_matching_pong_sets_nothing_off() -> None:
    assert registered().answered(Cell(7, 1), Cell(7, 1)) is Next.NOTHING


def test_generation_zero_sets_off_the_recovery() -> None:
    assert registered().answered(Cell(7, 1), Cell(7, 0)) is Next.RECOVER


def test_another_generation_sets_off_the_recovery() -> None:
    assert registered().answered(Cell(7, 1), Cell(7, 2)) is Next.RECOVER


def test_a_new_epoch_sets_off_the_recovery() -> None:
    assert registered().answered(Cell(7, 1), Cell(8, 1)) is Next.RECOVER


def test_the_recovery_edge_sets_it_off_even_if_the_server_still_knows_us() -> None:
    standing = registered()
    standing.lost()
    assert standing.answered(Cell(7, 1), Cell(7, 1)) is Next.RECOVER
    assert not standing.healthy  # register first, then be healthy
    standing.joins()
    assert not standing.healthy
    standing.joined(Cell(7, 1))
    assert standing.healthy


def test_a_reply_to_a_request_of_an_older_registration_sets_nothing_off() -> None:
    assert registered(Cell(7, 2)).answered(Cell(7, 1), Cell(7, 0)) is Next.NOTHING


def test_a_reply_while_a_register_is_on_its_way_sets_nothing_off() -> None:
    standing = registered()
    standing.joins()
    assert standing.answered(Cell(7, 1), Cell(8, 0)) is Next.NOTHING


def test_a_failed_recovery_stays_unhealthy_and_is_tried_at_the_next_pong() -> None:
    standing = registered()
    standing.lost()
    standing.joins()
    standing.failed()
    assert not standing.healthy
    assert standing.cell == Cell(7, 1)
    assert standing.answered(Cell(7, 1), Cell(8, 0)) is Next.RECOVER


def test_nothing_is_set_off_once_the_end_was_asked_for() -> None:
    standing = registered()
    standing.lost()
    standing.stop()
    assert standing.answered(Cell(7, 1), Cell(8, 0)) is Next.NOTHING
    standing.joins()
    standing.joined(Cell(8, 5))
    assert standing.cell == Cell(7, 1)
    assert not standing.healthy


@given(st.lists(st.sampled_from(["lost", "joins", "joined", "failed", "pong"])))
def test_healthy_comes_back_by_a_register_alone(steps: list[str]) -> None:
    standing = Standing()
    generation = 0
    for step in steps:
        before = standing.healthy
        if step == "joined":
            generation += 1
            standing.joined(Cell(7, generation))
        elif step == "pong":
            standing.answered(standing.cell, standing.cell)
        else:
            getattr(standing, step)()
        if standing.healthy and not before:
            assert step == "joined"
    assert standing.cell.generation == generation
