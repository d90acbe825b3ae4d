"""The alignment without sockets: all clients in one thread."""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from vfl.alignment import ot
from vfl.alignment.ecdh import leader, member
from vfl.alignment.ids import arrow_ids
from vfl.alignment.steps import Receive, Send, Steps, Terms


def silent(count: int) -> None:
    return


class Exchange:
    """All clients in one thread; keeps what every client received."""

    def __init__(
        self,
        sets: Sequence[Sequence[object]],
        pad_to: int | None = None,
        seed: int | None = 0,
        matching: str = "ecdh",
        minimum: int = 0,
    ):
        names = tuple(f"client {i}" for i in range(len(sets)))
        terms = Terms(names, pad_to, matching)
        coins = [
            secrets.token_bytes if seed is None else random.Random(f"{seed} {i}").randbytes for i in range(len(sets))
        ]
        self.steps: list[Steps] = []
        for me, (ids, coin) in enumerate(zip(sets, coins, strict=True)):
            if matching == "ot":
                self.steps.append(ot.align(terms, me, arrow_ids(ids), coin, silent, minimum))
            elif me == len(sets) - 1:
                self.steps.append(leader(terms, ids, coin, silent, minimum))
            else:
                self.steps.append(member(terms, me, ids, coin, silent, minimum))
        self.received: list[list[tuple[bytes, bytes]]] = [[] for _ in sets]
        self.sent: list[list[tuple[bytes, bytes]]] = [[] for _ in sets]
        self.rows: list[np.ndarray] = [np.zeros(0)] * len(sets)

    def run(self, messages: float = math.inf) -> Exchange:
        """Until all are done, or so many messages are sent."""
        queues: dict[tuple[int, int], list[tuple[bytes, bytes]]] = {}
        waiting: dict[int, Receive | None] = dict.fromkeys(range(len(self.steps)))
        while waiting:
            before = sum(map(len, self.received)), len(waiting), sum(map(len, self.sent))
            for me in list(waiting):
                if sum(map(len, self.sent)) >= messages:
                    return self
                self._advance(me, queues, waiting)
            assert before != (sum(map(len, self.received)), len(waiting), sum(map(len, self.sent))), "deadlock"
        assert not any(queues.values())
        return self

    def _advance(self, me: int, queues: dict[Any, Any], waiting: dict[Any, Any]) -> None:
        answer = None
        wanted = waiting[me]
        try:
            while True:
                if wanted is not None:
                    queue = queues.setdefault((wanted.source, me), [])
                    if not queue:
                        waiting[me] = wanted
                        return
                    kind, answer = queue.pop(0)
                    self.received[me].append((kind, answer))
                    assert kind == wanted.kind and wanted.low <= len(answer) <= wanted.high
                step = next(self.steps[me]) if answer is None else self.steps[me].send(bytearray(answer))
                answer = wanted = None
                if isinstance(step, Send):
                    queues.setdefault((me, step.to), []).append((step.kind, bytes(step.payload)))
                    self.sent[me].append((step.kind, bytes(step.payload)))
                else:
                    wanted = step
        except StopIteration as end:
            self.rows[me] = end.value
            del waiting[me]
