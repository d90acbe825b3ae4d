"""A server's own noise, a row per step, made ahead in a background thread, never all steps at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from threadpoolctl import ThreadpoolController

from accel.prg import Stream
from protocols.plan.run_plan import Plan
from protocols.plan.scales import GRADIENT_BITS
from protocols.server.idle_thread import SpareTime
from vfl.dp import NoiseSource

__all__ = ["NoiseAhead", "insecure_total_noise"]

BLOCK = 64


class NoiseAhead:
    """Rows of filtered noise at the gradient's scale; a step's share of later rows is computed beside that step.

    In a thread, whose kernels run without the interpreter lock, on one core and behind all else: what is needed only
    later must neither take the cores that the present step waits for nor come in a burst.
    """

    def __init__(self, plan: Plan, open_stream: Callable[[int], Stream], start: int = 0):
        self._thread = SpareTime("noise")
        self._libraries = ThreadpoolController()
        self._source: Future[NoiseSource] = self._thread.submit(
            NoiseSource,
            plan.factorisation,
            plan.parameters,
            plan.server_noise_std,
            open_stream,
            start=start,
            block=BLOCK,
        )
        self._row: Future[np.ndarray] = self._thread.submit(self._first_row)

    def _first_row(self) -> np.ndarray:
        source = self._source.result()
        with self._on_one_core(source):
            return source.next_row()

    def _next_row(self) -> np.ndarray:
        """One step's share of the work, and the next row: ready unless the thread fell behind."""
        source = self._source.result()
        with self._on_one_core(source):
            source.work()
            return source.next_row()

    def _on_one_core(self, source: NoiseSource) -> contextlib.AbstractContextManager[object]:
        limited: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if source.takes_blas:
            limited = self._libraries.limit(limits=1, user_api="blas")
        return limited

    def next_row(self) -> np.ndarray:
        """The noise of the next step, int64 at 46 bits."""
        row: np.ndarray = self._thread.wait_for(self._row)
        self._row = self._thread.submit(self._next_row)
        return row

    def wait(self) -> None:
        """Until this step's share of the work is done, for a measurement that counts it."""
        self._thread.wait_for(self._row)

    def close(self) -> None:
        """End the thread."""
        self._thread.close()


def insecure_total_noise(plan: Plan, streams: Sequence[Callable[[int], Stream]]) -> Callable[[int], np.ndarray]:
    """The sum of all servers' filtered noise, step by step, in the units of the gradients.

    Whoever has all servers' noise streams can subtract the noise: this is for comparing a run on one machine with its
    twin, never for a deployment. Of joint noise it is only what the servers add themselves.
    """
    std = plan.server_noise_std
    sources = [NoiseSource(plan.factorisation, plan.parameters, std, stream, block=BLOCK) for stream in streams]
    return lambda step: np.sum([source.next_row() * 2.0**-GRADIENT_BITS for source in sources], axis=0)
