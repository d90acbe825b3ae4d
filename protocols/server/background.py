"""Writing while training goes on: what no release waits for is written by a thread of its own, one piece at a time.

What must be on disk before something is sent is not written here (``protocols.server.releases``, ``protocols.server.opened``). An error
of the disk is raised, with its number and path, by the first step that looks afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Background"]


class Background:
    """At most one piece of work is under way; whoever has another waits, so that no more than one is held in memory."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin ``work`` when what is under way has ended; raises what that has failed of."""
        self.wait()
        self._thread = threading.Thread(target=self._do, args=(work,), name="writes")
        self._thread.start()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # for the next who looks
            self._error = error

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise what the last piece has failed of, if it has. Does not wait."""
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        """Until nothing is under way; raises what it has failed of."""
        self.close()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Until nothing is under way, and whatever came of it: for whoever ends because of something else."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
