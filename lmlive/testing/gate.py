"""A place where threads wait until a test lets them go on."""

import threading


class Gate:
    """Stops the threads that ``pass_through`` while it is shut.

    A thread that waits here does not count as running for a ``VirtualLoop``: time goes on without it, as it does for a
    driver call that hangs.
    """

    _all_lock = threading.Lock()
    _all_waiting = 0

    def __init__(self) -> None:
        self._changed = threading.Condition(Gate._all_lock)
        self._shut = True
        self._waiting = 0

    def __repr__(self) -> str:
        """Show its state."""
        return f"<Gate {'shut' if self._shut else 'open'} waiting={self._waiting}>"

    @property
    def waiting(self) -> int:
        """How many threads wait here."""
        with Gate._all_lock:
            return self._waiting

    @staticmethod
    def waiting_anywhere() -> int:
        """Count the threads of this process that wait at any gate."""
        with Gate._all_lock:
            return Gate._all_waiting

    def open(self) -> None:
        """Let all go on, those that come later too."""
        with self._changed:
            self._shut = False
            # Here, not when they wake up: from now on they run.
            Gate._all_waiting -= self._waiting
            self._waiting = 0
            self._changed.notify_all()

    def pass_through(self) -> None:
        """Go on, or wait until the gate is open; a lane's thread."""
        with self._changed:
            if not self._shut:
                return
            self._waiting += 1
            Gate._all_waiting += 1
            while self._shut:
                self._changed.wait()
