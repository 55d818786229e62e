import threading

from lmlive.testing import Gate
from tests.conftest import eventually


async def test_threads_wait_until_it_opens_and_later_ones_do_not() -> None:
    gate, other = Gate(), Gate()
    threads = [threading.Thread(target=each.pass_through) for each in (gate, gate, other)]
    for thread in threads:
        thread.start()
    await eventually(lambda: (gate.waiting, other.waiting) == (2, 1))
    assert Gate.waiting_anywhere() == 3
    gate.open()
    assert (gate.waiting, Gate.waiting_anywhere()) == (0, 1)
    gate.pass_through()
    gate.open()
    other.open()
    for thread in threads:
        thread.join()
    assert Gate.waiting_anywhere() == 0
    assert repr(gate) == "<Gate open waiting=0>"
