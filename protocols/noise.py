"""A server's own noise, a row per step, made ahead in a background thread, never all steps at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from threadpoolctl import ThreadpoolController

from accel.prg import Stream
from protocols.plan import Plan
from protocols.scales import GRADIENT_BITS
from vfl.dp import NoiseSource

__all__ = ["NoiseAhead", "insecure_total_noise"]

BLOCK = 64


class NoiseAhead:
    """Rows of filtered noise at the gradient's scale; the next block is computed while the present one is used.

    On one core: what is needed only 64 steps later must not take the cores that the present step waits for.
    """

    def __init__(self, plan: Plan, open_stream: Callable[[int], Stream], start: int = 0):
        self._left = plan.schedule.num_steps - start
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="noise")
        self._libraries = ThreadpoolController()
        self._source = self._pool.submit(
            NoiseSource,
            plan.factorisation,
            plan.parameters,
            plan.server_noise_std,
            open_stream,
            start=start,
            block=BLOCK,
        )
        self._rows: list[np.ndarray] = []
        self._ahead: Future[list[np.ndarray]] | None = None
        self._prefetch()

    def _prefetch(self) -> None:
        count = min(BLOCK, self._left)
        self._left -= count
        self._ahead = self._pool.submit(self._draw, count) if count else None

    def _draw(self, count: int) -> list[np.ndarray]:
        source = self._source.result()
        with self._libraries.limit(limits=1, user_api="blas"):
            return [source.next_row() for _ in range(count)]

    def next_row(self) -> np.ndarray:
        """The noise of the next step, int64 at 46 bits."""
        if not self._rows:
            assert self._ahead is not None
            self._rows = self._ahead.result()
            self._prefetch()
        return self._rows.pop(0)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def insecure_total_noise(plan: Plan, streams: Sequence[Callable[[int], Stream]]) -> Callable[[int], np.ndarray]:
    """The sum of all servers' filtered noise, step by step, in the units of the gradients.

    Whoever has all servers' noise streams can subtract the noise: this is for comparing a run on one machine with its
    twin, never for a deployment. Of joint noise it is only what the servers add themselves.
    """
    std = plan.server_noise_std
    sources = [NoiseSource(plan.factorisation, plan.parameters, std, stream, block=BLOCK) for stream in streams]
    return lambda step: np.sum([source.next_row() * 2.0**-GRADIENT_BITS for source in sources], axis=0)
