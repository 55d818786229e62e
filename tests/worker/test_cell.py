from hypothesis import given
from hypothesis import strategies as st

from lmlive.worker.cell import NOWHERE, Cell, Health, Next

FIRST = Cell(7, 1)


def registered(cell: Cell = FIRST) -> Health:
    health = Health()
    health.joins()
    health.joined(cell)
    return health


def test_it_starts_healthy_and_registered_nowhere() -> None:
    health = Health()
    assert health.healthy
    assert health.cell == NOWHERE


def test_a_matching_pong_sets_nothing_off() -> None:
    assert registered().answered(1, Cell(7, 1)) is Next.NOTHING


def test_generation_zero_sets_off_the_recovery() -> None:
    assert registered().answered(1, Cell(7, 0)) is Next.RECOVER


def test_another_generation_sets_off_the_recovery() -> None:
    assert registered().answered(1, Cell(7, 2)) is Next.RECOVER


def test_a_new_epoch_sets_off_the_recovery() -> None:
    assert registered().answered(1, Cell(8, 1)) is Next.RECOVER


def test_the_recovery_edge_sets_it_off_even_if_the_server_still_knows_us() -> None:
    health = registered()
    health.lost()
    assert health.answered(1, Cell(7, 1)) is Next.RECOVER
    assert not health.healthy  # register first, then be healthy
    health.joins()
    assert not health.healthy
    health.joined(Cell(7, 1))
    assert health.healthy


def test_a_reply_to_a_request_of_an_older_registration_sets_nothing_off() -> None:
    health = registered()
    health.joins()
    health.joined(Cell(7, 2))
    assert health.answered(1, Cell(7, 0)) is Next.NOTHING
    assert health.answered(2, Cell(7, 0)) is Next.RECOVER


def test_a_refresh_makes_older_what_was_sent_before_it_though_the_cell_is_the_same() -> None:
    health = registered()
    health.joins()
    health.joined(FIRST)
    assert health.answered(1, Cell(7, 0)) is Next.NOTHING


def test_a_failed_ping_makes_it_unhealthy() -> None:
    health = registered()
    health.unanswered(1)
    assert not health.healthy


def test_a_failed_ping_of_before_a_register_counts_for_nothing() -> None:
    health = registered()
    health.joins()
    health.unanswered(1)  # while it is on its way
    health.joined(FIRST)
    health.unanswered(1)  # and when it came to its end
    assert health.healthy


def test_a_reply_while_a_register_is_on_its_way_sets_nothing_off() -> None:
    health = registered()
    health.joins()
    assert health.answered(1, Cell(8, 0)) is Next.NOTHING


def test_a_failed_recovery_stays_unhealthy_and_is_tried_at_the_next_pong() -> None:
    health = registered()
    health.lost()
    health.joins()
    health.failed()
    assert not health.healthy
    assert health.cell == Cell(7, 1)
    assert health.answered(1, Cell(8, 0)) is Next.RECOVER


def test_nothing_is_set_off_once_the_end_was_asked_for() -> None:
    health = registered()
    health.lost()
    health.stop()
    assert health.answered(1, Cell(8, 0)) is Next.NOTHING
    health.joins()
    health.joined(Cell(8, 5))
    assert health.cell == Cell(7, 1)
    assert not health.healthy


def test_closing_ends_a_ping_and_that_is_no_news() -> None:
    health = registered()
    health.stop()
    health.unanswered(1)
    assert health.healthy


@given(st.lists(st.sampled_from(["lost", "joins", "joined", "failed", "pong"])))
def test_healthy_comes_back_by_a_register_alone(steps: list[str]) -> None:
    health = Health()
    generation = 0
    for step in steps:
        before = health.healthy
        if step == "joined":
            generation += 1
            health.joined(Cell(7, generation))
        elif step == "pong":
            health.answered(health.joins_done, health.cell)
        else:
            getattr(health, step)()
        if health.healthy and not before:
            assert step == "joined"
    assert health.cell.generation == generation
