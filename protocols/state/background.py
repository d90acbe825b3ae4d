"""Writing while training goes on: what no release waits for is written by a thread of its own, one piece at a time.

What must be on disk before something is sent is not written here (``protocols.state.releases``,
``protocols.state.step_log``). An error of the disk is raised, with its number and path, by the first step that looks
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["Background"]


class Background:
    """At most one piece of work is under way; whoever has another waits, so that no more than one is held in memory."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None  # kept: on a busy machine, starting one takes longer than a step
        self._work: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin ``work`` when what is under way has ended; raises what that has failed of."""
        self.wait()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "writes")
        self._work = self._thread.submit(work)

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return self._work is not None and not self._work.done()

    def check(self) -> None:
        """Raise what the last piece has failed of, if it has. Does not wait."""
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        """Until nothing is under way; raises what it has failed of, once."""
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def close(self) -> None:
        """Until nothing is under way, and whatever came of it: for whoever ends because of something else."""
        thread, self._thread, self._work = self._thread, None, None
        if thread is not None:
            thread.shutdown()
