"""Matching by an oblivious PRF (``vfl.alignment.oprf``), as generators of messages: AES and hashes, and 512 public-key
operations a pair of clients.

*Opening.* The leader sends terms, the length of its list and a commitment to a nonce; every member answers with its own
length and nonce; the leader opens its nonce and shows all that was said. α is the hash of it all: nobody chose it. Salt
and labels are derived from it.

*Two clients.* The one with the shorter list (or the leader) evaluates. For every bin it sends U; the holder answers
with a tag of 96 bits for each of its ids, at random slots among random tags, as many as its list has room for. The
evaluator finds its own tags among them, says how many there are, and, unless somebody stops there, sends the slots of
the common ids in the order of their tags.

*More clients*, members 0 … k−1 and the leader. Every ordered pair of members (e, h) has a function F_{e←h}, known to e
on its own ids and to h everywhere. A member's z(y) is the sum of all its functions at y: the z of all members add up to
zero where y is in all their lists, and are random otherwise. The leader evaluates a function (G, tag) of every member;
each sends it a store Q of y ↦ G(y) ⊕ z(y). An id of the leader is common if ⟨row, Q⟩ ⊕ G of all members add up to zero.
It draws an order and sends every member the tags of the common ids.

*What one corrupted client sees*, all servers beside it or not: its own ids, the lengths of the lists, and the ids that
all have. So does a coalition, against any client that is not in it (docs/proofs §10.2, Theorems A and B; no overlap of
some of the lists shows). Clients are semi-honest, but a leader or evaluator that flips bits to learn Δ is refused
(``oprf``).

A client that fails begins again with another α and other keys, so that no key is ever used for two lists.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from accel import kernels
from vfl.alignment import base_ot
from vfl.alignment.okvs import Bins, Shape, bins_for, rows_of, store_values
from vfl.alignment.oprf import Evaluator, Holder, Uniform, bits_of, message_bytes
from vfl.alignment.steps import (
    MAX_IDS,
    Advance,
    AlignmentError,
    AlignmentRefused,
    Randomness,
    Receive,
    Send,
    Steps,
    Terms,
    hear_count,
    permutation,
    tell_count,
)

__all__ = ["align", "evaluator_of"]

HELLO, NONCE, OFFER, ANSWER, ROWS, TAGS, STORE, CHOSEN = (bytes([letter]) for letter in b"TBOAUVQS")
AHEAD = 4  # bins that are under way; all clients wait for an answer after as many
_FRAME = 1 << 18  # tags or slots in one message
_TAG = 12
_NOBODY = 2**32 - 1
_LIMIT = 1 << 16  # bytes of a greeting

Yields = Send | Receive
Result = TypeVar("Result")


def align(
    terms: Terms,
    me: int,
    ids: pa.Array,
    randomness: Randomness = secrets.token_bytes,
    advance: Advance = lambda count: None,
    minimum: int = 0,
    folder: Path | None = None,
) -> Steps:
    """What client ``me`` does. ``ids``: an Arrow column of text or bytes. ``folder``: for lists that would take much
    memory. ``advance(n)`` is told of every n ids that were hashed, and again when they were compared."""
    run = yield from _open(terms, me, ids, randomness, advance, minimum, folder)
    if len(terms.clients) > 2:
        return (yield from (_lead(run) if run.leads else _join(run)))
    evaluator = evaluator_of(run.sizes)
    return (yield from (_evaluate(run, 1 - me) if me == evaluator else _hold(run, evaluator)))


def evaluator_of(sizes: list[int]) -> int:
    """Which of two clients evaluates: the one with the shorter list, which costs 85 bytes an id; the other's 12. In
    doubt the leader."""
    return 0 if sizes[0] < sizes[1] else 1


@dataclass
class _Run:
    """One client's view of one attempt."""

    terms: Terms
    me: int
    sizes: list[int]
    alpha: bytes
    ids: pa.Array
    randomness: Randomness
    advance: Advance
    minimum: int
    folder: Path | None

    def __post_init__(self) -> None:
        self.bins = bins_for(max(self.sizes))
        self.shapes = [Shape(size, self.bins) for size in self.sizes]
        self.uniform = Uniform(self.randomness)
        self.count = len(self.ids)

    @property
    def mine(self) -> Shape:
        return self.shapes[self.me]

    @property
    def leads(self) -> bool:
        return self.me == len(self.sizes) - 1

    def label(self, *words: object) -> bytes:
        """A key for one purpose of this attempt."""
        return hashlib.blake2b(" ".join(map(str, words)).encode(), key=self.alpha, digest_size=32).digest()

    def binned(self) -> Bins:
        """The own ids, hashed; they are not needed any more."""
        ids, self.ids = self.ids, pa.array([], self.ids.type)
        return Bins(ids, self.label("salt")[:16], self.mine, self.folder, self.advance)

    def name(self, client: int) -> str:
        return self.terms.clients[client]

    def stored(self, records: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """P of a bin."""
        store_values(records, np.ascontiguousarray(records[:, :2]), self.mine, drawn)
        return drawn


# opening -----------------------------------------------------------------------------------------


def _open(
    terms: Terms,
    me: int,
    ids: pa.Array,
    randomness: Randomness,
    advance: Advance,
    minimum: int,
    folder: Path | None,
) -> Generator[Yields, bytearray, _Run]:
    leader, size, nonce = len(terms.clients) - 1, terms.padded(len(ids)), randomness(32)
    shown = _committed(nonce.hex()) if me == leader else nonce.hex()
    mine = json.dumps({"terms": terms.encoded().decode(), "ids": size, "nonce": shown}).encode()
    if me == leader:
        for j in range(leader):
            yield Send(j, HELLO, mine)
        hellos = []
        for j in range(leader):
            hellos.append(bytes((yield Receive(j, HELLO, 1, _LIMIT))))
            _size(terms, hellos[j], terms.clients[j])
        opened = json.dumps({"nonce": nonce.hex(), "hellos": [hello.decode() for hello in hellos]}).encode()
        for j in range(leader):
            yield Send(j, NONCE, opened)
        hellos.append(mine)
    else:
        name = terms.clients[leader]
        first = bytes((yield Receive(leader, HELLO, 1, _LIMIT)))
        yield Send(leader, HELLO, mine)
        _size(terms, first, name)
        opened = bytes((yield Receive(leader, NONCE, 1, 2 * _LIMIT * leader)))
        facts = _parsed(opened, name)
        hellos = [str(hello).encode() for hello in facts.get("hellos") or ()]
        if _committed(str(facts.get("nonce"))) != _parsed(first, name).get("nonce"):
            raise AlignmentRefused(f"client {name!r} opened another nonce than it committed to: refused")
        if len(hellos) != leader or hellos[me] != mine:
            raise AlignmentRefused(f"client {name!r} repeats another greeting than this client has sent: refused")
        hellos.append(first)
    sizes = [_size(terms, hello, name) for hello, name in zip(hellos, terms.clients, strict=True)]
    alpha = hashlib.blake2b(digest_size=32, person=b"ppvfl alignment")
    for said in (*hellos, opened):
        alpha.update(len(said).to_bytes(8, "little") + said)
    return _Run(terms, me, sizes, alpha.digest(), ids, randomness, advance, minimum, folder)


def _committed(nonce: str) -> str:
    """What the leader says of its nonce (64 hexadecimal digits) before it has heard the others'."""
    return hashlib.blake2b(nonce.encode()).hexdigest()


def _parsed(said: bytes, name: str) -> dict[str, Any]:
    try:
        found = json.loads(said)
        if isinstance(found, dict):
            return found
    except ValueError:
        pass
    raise AlignmentError(f"client {name!r} sent a greeting that cannot be read: it runs another version or other terms")


def _size(terms: Terms, hello: bytes, name: str) -> int:
    """The length of a client's list, if its terms are these."""
    try:
        facts = _parsed(hello, name)
    except AlignmentError:
        facts = {"terms": hello.decode(errors="replace")}  # of another version: say which
    terms.compare(str(facts.get("terms", facts)).encode(), name)
    size = facts.get("ids")
    longest = MAX_IDS["ot"] if terms.pad_to is None else terms.pad_to
    if type(size) is not int or not (0 if terms.pad_to is None else terms.pad_to) <= size <= longest:
        raise AlignmentRefused(f"client {name!r} announces a list of {size!r} ids: refused")
    return size


# keys and threads --------------------------------------------------------------------------------


def _exchange_keys(
    run: _Run, evaluates: list[int], holds: list[int]
) -> Generator[Yields, bytearray, tuple[dict[int, Evaluator], dict[int, Holder]]]:
    """The functions that this client evaluates (keys of ``evaluates``) and those that it holds (evaluated by
    ``holds``)."""
    offers = {}
    for h in evaluates:
        offers[h] = base_ot.offer(run.randomness)
        yield Send(h, OFFER, offers[h][1])
    holders, evaluators = {}, {}
    for e in holds:
        delta, label = run.randomness(base_ot.COUNT // 8), run.label("F", e, run.me)
        offered = bytes((yield Receive(e, OFFER, base_ot.POINT, base_ot.POINT)))
        points, keys = base_ot.answer(offered, bits_of(delta), label, run.randomness, run.name(e))
        yield Send(e, ANSWER, points)
        holders[e] = Holder(delta, keys, label, run.shapes[e], run.name(e))
    for h in evaluates:
        size, label = base_ot.POINT * base_ot.COUNT, run.label("F", run.me, h)
        answered = bytes((yield Receive(h, ANSWER, size, size)))
        pairs = base_ot.key_pairs(*offers[h], answered, label, run.name(h))
        evaluators[h] = Evaluator(pairs, label, run.mine)
    return evaluators, holders


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(min(AHEAD, os.cpu_count() or 1))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(count: int, begin: Callable[[int], Future[Result]]) -> Iterator[Result]:
    """The results of bins, one after the other, while the next ones are worked on."""
    waiting: deque[Future[Result]] = deque()
    for number in range(count):
        waiting.append(begin(number))
        if len(waiting) == AHEAD:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _rows_exactly(run: _Run, evaluator: int) -> Receive:
    size = message_bytes(run.shapes[evaluator])
    return Receive(evaluator, ROWS, size, size)


# two clients -------------------------------------------------------------------------------------


def _tags(values: np.ndarray) -> np.ndarray:
    """96 bits of each value, as two words."""
    tags = values[:, 2:].copy()
    tags[:, 1] &= np.uint64(0xFFFFFFFF)
    return tags


def _pack(tags: np.ndarray) -> bytes:
    return tags[:, 0].tobytes() + tags[:, 1].astype(np.uint32).tobytes()


def _unpack(data: bytearray) -> np.ndarray:
    count = len(data) // _TAG
    tags = np.empty((count, 2), np.uint64)
    tags[:, 0] = np.frombuffer(data, np.uint64, count)
    tags[:, 1] = np.frombuffer(data, np.uint32, count, 8 * count)
    return tags


def _evaluate(run: _Run, other: int) -> Steps:
    evaluators, _ = yield from _exchange_keys(run, [other], [])
    evaluator, bins, theirs = evaluators[other], run.binned(), run.shapes[other].capacity
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # tags, rows, slots
    own: deque[np.ndarray] = deque()

    def begin(number: int) -> Future[tuple[np.ndarray, np.ndarray]]:
        return pool.submit(work, number, evaluator.draw(), run.uniform.draw(run.mine.lines, 2))

    def work(number: int, drawn: tuple[np.ndarray, np.ndarray], free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        records = bins.checked(number)
        values, message = evaluator.extend(number, drawn, run.stored(records, free), records)
        return _tags(values), message

    def take(data: bytearray) -> None:
        number, mine, tags = len(found), own.popleft(), _unpack(data)
        table = np.empty(1 << (2 * len(mine) + 1).bit_length(), np.int64)
        places = np.empty(len(tags), np.int64)
        kernels.match_tags(mine, tags, table, places)
        slots = np.flatnonzero(places >= 0)
        rows = rows_of(bins[number])[places[slots]]
        found.append((tags[slots, 0], rows, (slots + number * theirs).astype(np.uint64)))
        run.advance(len(mine))

    with _threads() as pool:
        for tags, message in _in_order(run.bins, begin):
            own.append(tags)
            yield Send(other, ROWS, message.data)
            if len(own) > AHEAD:
                take((yield Receive(other, TAGS, _TAG * theirs, _TAG * theirs)))
        while own:
            take((yield Receive(other, TAGS, _TAG * theirs, _TAG * theirs)))
    tags, rows, slots = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(tags, kind="stable")
    yield from tell_count(run.terms, run.me, len(order), run.minimum)
    for start in range(0, len(order), _FRAME):
        yield Send(other, CHOSEN, slots[order[start : start + _FRAME]].tobytes())
    return rows[order]


def _hold(run: _Run, evaluator: int) -> Steps:
    _, holders = yield from _exchange_keys(run, [], [evaluator])
    holder, bins, capacity = holders[evaluator], run.binned(), run.mine.capacity
    rows_at = np.full(run.bins * capacity, _NOBODY, np.uint32)
    waiting: deque[Future[bytes]] = deque()

    def work(number: int, drawn: np.ndarray, message: bytearray, tags: np.ndarray, order: np.ndarray) -> bytes:
        records = bins.checked(number)
        slots = np.argsort(order)[: len(records)]
        tags[:, 1] &= np.uint64(0xFFFFFFFF)
        tags[slots] = _tags(holder.extend(number, drawn, message, records))
        rows_at[number * capacity + slots] = rows_of(records)
        run.advance(len(records))
        return _pack(tags)

    with _threads() as pool:
        for number in range(run.bins):
            message = yield _rows_exactly(run, evaluator)
            tags, order = run.uniform.draw(capacity, 2), run.uniform.draw(capacity)
            waiting.append(pool.submit(work, number, holder.draw(), message, tags, order))
            if len(waiting) == AHEAD:
                yield Send(evaluator, TAGS, waiting.popleft().result())
        while waiting:
            yield Send(evaluator, TAGS, waiting.popleft().result())
    count = yield from hear_count(evaluator, run.minimum, run.count)
    rows = np.empty(count, np.int64)
    for start in range(0, count, _FRAME):
        size = min(_FRAME, count - start)
        slots = np.frombuffer((yield Receive(evaluator, CHOSEN, 8 * size, 8 * size)), np.uint64)
        known = slots < np.uint64(len(rows_at))
        if not known.all() or len(np.unique(slots)) != size or (rows_at[slots] == _NOBODY).any():
            raise AlignmentRefused(f"client {run.name(evaluator)!r} sent slots that are repeated or unused: refused")
        rows[start : start + size] = rows_at[slots]
        rows_at[slots] = _NOBODY
    return rows


# more clients ------------------------------------------------------------------------------------


def _join(run: _Run) -> Steps:
    leader = len(run.sizes) - 1
    others = [j for j in range(leader) if j != run.me]
    evaluators, holders = yield from _exchange_keys(run, others, [*others, leader])
    bins = run.binned()
    tags: list[np.ndarray] = []
    waiting: deque[Future[tuple[bytes, np.ndarray]]] = deque()

    def begin(number: int) -> Future[tuple[np.ndarray, dict[int, np.ndarray]]]:
        drawn = {h: evaluator.draw() for h, evaluator in evaluators.items()}
        return pool.submit(offer, number, drawn, run.uniform.draw(run.mine.lines, 2))

    def offer(number: int, drawn: dict[int, Any], free: np.ndarray) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """The part of z from what this client evaluates, and what the others need for theirs."""
        records, messages = bins.checked(number), {}
        store, total = run.stored(records, free), np.zeros((len(records), 2), np.uint64)
        for h, evaluator in evaluators.items():
            values, messages[h] = evaluator.extend(number, drawn[h], store, records)
            total ^= values[:, :2]
        return total, messages

    def answer(
        number: int, drawn: dict[int, np.ndarray], received: dict[int, bytearray], total: np.ndarray, free: np.ndarray
    ) -> tuple[bytes, np.ndarray]:
        records = bins[number]
        values = {e: holder.extend(number, drawn[e], received[e], records) for e, holder in holders.items()}
        for found in values.values():
            total ^= found[:, :2]
        store_values(records, total, run.mine, free)
        run.advance(len(records))
        return free.tobytes(), _tags(values[leader])

    with _threads() as pool:
        for number, (total, messages) in enumerate(_in_order(run.bins, begin)):
            for h, message in messages.items():
                yield Send(h, ROWS, message.data)
            received = {}
            for e in holders:
                received[e] = yield _rows_exactly(run, e)
            columns = {e: holder.draw() for e, holder in holders.items()}
            free = run.uniform.draw(run.mine.stored, 2)
            waiting.append(pool.submit(answer, number, columns, received, total, free))
            while len(waiting) == AHEAD or (waiting and number == run.bins - 1):
                store, found = waiting.popleft().result()
                tags.append(found)
                yield Send(leader, STORE, store)
    return (yield from _take_order(run, leader, np.concatenate(tags), _all_rows(bins, run.bins)))


def _all_rows(bins: Bins, count: int) -> np.ndarray:
    return np.concatenate([rows_of(bins[number]) for number in range(count)])


def _take_order(run: _Run, leader: int, tags: np.ndarray, rows: np.ndarray) -> Steps:
    """The own rows that the leader names by their tags; each once, and none that is not here."""
    count = yield from hear_count(leader, run.minimum, run.count)
    order = np.argsort(tags[:, 0], kind="stable")
    sorted_tags, sorted_rows = tags[order], rows[order]
    places = np.empty(count, np.int64)
    for start in range(0, count, _FRAME):
        size = min(_FRAME, count - start)
        named = _unpack((yield Receive(leader, CHOSEN, _TAG * size, _TAG * size)))
        at = np.minimum(np.searchsorted(sorted_tags[:, 0], named[:, 0]), len(rows) - 1)
        if not (sorted_tags[at] == named).all():
            raise AlignmentRefused(f"client {run.name(leader)!r} named an id that this client does not have: refused")
        places[start : start + size] = at
    if len(np.unique(places)) != count:
        raise AlignmentRefused(f"client {run.name(leader)!r} named an id twice: refused")
    return sorted_rows[places]


def _lead(run: _Run) -> Steps:
    members = list(range(len(run.sizes) - 1))
    evaluators, _ = yield from _exchange_keys(run, members, [])
    bins = run.binned()
    pending: deque[tuple[int, np.ndarray, list[np.ndarray]]] = deque()  # number of the bin, sum of G, tags by member
    common: list[tuple[np.ndarray, list[np.ndarray]]] = []

    def begin(number: int) -> Future[tuple[int, np.ndarray, list[np.ndarray], list[np.ndarray]]]:
        drawn = {j: evaluators[j].draw() for j in members}
        return pool.submit(work, number, drawn, run.uniform.draw(run.mine.lines, 2))

    def work(
        number: int, drawn: dict[int, Any], free: np.ndarray
    ) -> tuple[int, np.ndarray, list[np.ndarray], list[np.ndarray]]:
        records = bins.checked(number)
        store, total = run.stored(records, free), np.zeros((len(records), 2), np.uint64)
        tags, messages = [], []
        for j in members:
            values, message = evaluators[j].extend(number, drawn[j], store, records)
            total ^= values[:, :2]
            tags.append(_tags(values))
            messages.append(message)
        return number, total, tags, messages

    def take() -> Generator[Yields, bytearray, None]:
        number, total, tags = pending.popleft()
        records = bins[number]
        for j in members:
            size = 16 * run.shapes[j].stored
            store = np.frombuffer((yield Receive(j, STORE, size, size)), np.uint64).reshape(-1, 2)
            kernels.decode_values(records, store, run.shapes[j].sparse, total)
        same = np.flatnonzero(~total.any(axis=1))
        common.append((rows_of(records)[same], [each[same] for each in tags]))
        run.advance(len(records))

    with _threads() as pool:
        for number, total, tags, messages in _in_order(run.bins, begin):
            pending.append((number, total, tags))
            for j in members:
                yield Send(j, ROWS, messages[j].data)
            if len(pending) > AHEAD:
                yield from take()
        while pending:
            yield from take()
    rows = np.concatenate([found for found, _ in common])
    order = permutation(run.randomness, len(rows))
    yield from tell_count(run.terms, run.me, len(rows), run.minimum)
    for j in members:
        named = np.concatenate([tags[j] for _, tags in common])[order]
        for start in range(0, len(named), _FRAME):
            yield Send(j, CHOSEN, _pack(named[start : start + _FRAME]))
    return rows[order]
