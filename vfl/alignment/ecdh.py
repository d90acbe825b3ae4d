"""The intersection of n clients' ids, as generators of messages: no sockets, and no randomness but what they are given.

Every list of hashed ids is blinded by every client, each with a fresh key, and only then compared; equal ids have equal
n-fold blinded values, and by DDH on the curve everything else looks random. Members 0 … k−1 (k = n − 1) have a link to
the leader only:

1. Everybody hashes, pads, shuffles and blinds its own list, and the members send theirs to the leader.
2. In step s = 1 … k the leader hands member j the list of member j − s (mod k; not in the last step), and its own list
   if j = s − 1. Each is blinded and shuffled, and comes back.
3. The leader blinds the members' lists, last of all, intersects the n lists and sorts the common values: that order is
   random, and the same for all. It has the positions of the common values in each list led back through the shuffles,
   the last shuffle first, and tells each member the positions in its own list.

What semi-honest clients see. *A member*: lists of other clients whose sets of blinding keys all differ, so nothing can
be compared with anything; random positions; the positions of the common ids in its own list. It learns the intersection
and the lengths of the lists. *The leader*: with n > 2 also the sizes of the overlaps of some of the lists, because
equal values show, but not of whom they consist, not even for its own ids, which the members have shuffled (with n = 2
the only overlap is the intersection). *Clients that pool what they see* learn no more than such sizes about one that
does not, since its shuffle is in every list. ``pad_to`` hides the lengths behind a public bound.

What a malicious client could do: offer ids that it only guesses (up to the bound) and learn which of them match; leave
out, repeat or replace values, so that rows are lost or misaligned; as leader, hand a list to other members than agreed,
and so learn the size of an overlap. Points of small order and values not in canonical form are refused; points on the
twist are harmless, its order is four times a prime and keys are multiples of eight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vfl.alignment.group import ELEMENT, blind, hash_and_blind, valid_elements
from vfl.alignment.ids import encode_ids
from vfl.alignment.steps import (
    MAX_IDS,
    Advance,
    AlignmentError,
    Randomness,
    Receive,
    Send,
    Steps,
    Terms,
    hear_count,
    permutation,
    tell_count,
)

__all__ = ["leader", "member", "positions_in_all"]

TERMS, LIST, OPEN, MATCHED = b"T", b"L", b"O", b"M"  # kinds of messages


class _Blinder:
    """One client's secrets of one run: its key, the order in which it offered its ids, its shuffle of the leader's."""

    def __init__(self, terms: Terms, ids: Sequence[object], randomness: Randomness, advance: Advance):
        self._values = encode_ids(ids)
        self._own = len(self._values)
        self.size = terms.padded(self._own)
        self._key = randomness(32)
        self._randomness = randomness
        self._advance = advance

    def offer(self) -> bytes:
        """The own list: hashed, padded with hashes of random numbers, shuffled, blinded."""
        self._order = permutation(self._randomness, self.size)
        padding = [b"\0" + self._randomness(32) for _ in range(self.size - self._own)]
        values = [*self._values, *padding]
        self._values = []  # of no use any more, and large
        return hash_and_blind(self._key, [values[i] for i in self._order], self._advance)

    def blind(self, data: bytes, owner: str) -> bytes:
        """Somebody's list with this client's key on top, in the order it came."""
        try:
            return blind(self._key, data, self._advance)
        except ValueError as error:
            raise AlignmentError(f"the list of client {owner!r} holds a point of small order: refused") from error

    def rows(self, positions: np.ndarray, source: str) -> np.ndarray:
        """Own row numbers of positions in the offered list."""
        rows = self._order[positions]
        if len(rows) and rows.max() >= self._own:
            raise AlignmentError(f"client {source!r} matched a padded entry: it does not follow the protocol")
        return rows

    def shuffle(self, count: int) -> np.ndarray:
        """A uniform permutation, for somebody else's list."""
        return permutation(self._randomness, count)


def _check_list(data: bytes | bytearray, source: str) -> bytes:
    elements = bytes(data)
    if not valid_elements(elements):
        raise AlignmentError(f"client {source!r} sent a list with repeated or malformed values: refused")
    return elements


def _list_bytes(terms: Terms) -> tuple[int, int]:
    """The least and the largest size of a list that is acceptable."""
    low, high = (0, MAX_IDS["ecdh"]) if terms.pad_to is None else (terms.pad_to, terms.pad_to)
    return low * ELEMENT, high * ELEMENT


def _positions(data: bytes | bytearray, size: int, source: str) -> np.ndarray:
    found = np.frombuffer(data, dtype="<u4") if len(data) % 4 == 0 else None
    if found is None or len(np.unique(found)) != len(found) or (len(found) and found.max() >= size):
        raise AlignmentError(f"client {source!r} sent positions that are repeated or not below {size}: refused")
    return found.astype(np.int64)


def _due(step: int, j: int, count: int) -> list[int]:
    """Whose lists member j works on in a step: indices into ``clients``, the leader's is ``count``."""
    return [(j - step) % count] * (step < count) + [count] * (step == j + 1)


def member(
    terms: Terms, mine: int, ids: Sequence[object], randomness: Randomness, advance: Advance, minimum: int = 0
) -> Steps:
    """What member ``mine`` does, which has a link to the leader only. Returns own row numbers in the common order."""
    leading, count = terms.clients[-1], len(terms.clients) - 1
    blinder = _Blinder(terms, ids, randomness, advance)
    theirs = yield Receive(count, TERMS, 1, 1 << 16)
    yield Send(count, TERMS, terms.encoded())
    terms.compare(bytes(theirs), leading)
    yield Send(count, LIST, blinder.offer())
    shuffles: dict[int, np.ndarray] = {}
    for step in range(1, count + 1):
        received = {}
        for owner in _due(step, mine, count):
            received[owner] = _check_list((yield Receive(count, LIST, *_list_bytes(terms))), leading)
        for owner, data in received.items():
            blinded = _elements(blinder.blind(data, terms.clients[owner]))
            shuffles[owner] = blinder.shuffle(len(blinded))
            yield Send(count, LIST, blinded[shuffles[owner]].tobytes())
    yield from hear_count(count, minimum, blinder.size)
    for step in range(count, 0, -1):
        for owner in _due(step, mine, count):
            shuffle = shuffles[owner]
            shuffled = _positions((yield Receive(count, OPEN, 0, 4 * len(shuffle))), len(shuffle), leading)
            yield Send(count, OPEN, _packed(shuffle[shuffled]))
    matched = yield Receive(count, MATCHED, 0, 4 * blinder.size)
    return blinder.rows(_positions(matched, blinder.size, leading), leading)


def leader(terms: Terms, ids: Sequence[object], randomness: Randomness, advance: Advance, minimum: int = 0) -> Steps:
    """What the leading client does."""
    members = terms.clients[:-1]
    count = len(members)
    blinder = _Blinder(terms, ids, randomness, advance)
    for j in range(count):
        yield Send(j, TERMS, terms.encoded())
    for j, name in enumerate(members):
        terms.compare(bytes((yield Receive(j, TERMS, 1, 1 << 16))), name)
    own = blinder.offer()
    lists = []
    for j, name in enumerate(members):
        lists.append(_check_list((yield Receive(j, LIST, *_list_bytes(terms))), name))
    lists.append(own)
    blinded: list[np.ndarray] = []
    for step in range(1, count + 1):
        for j in range(count):
            for owner in _due(step, j, count):
                yield Send(j, LIST, lists[owner])
        if step == count:  # while the last member works on the leader's list
            blinded = [_elements(blinder.blind(data, name)) for name, data in zip(members, lists[:-1], strict=True)]
        for j, name in enumerate(members):
            for owner in _due(step, j, count):
                size = len(lists[owner])
                lists[owner] = _check_list((yield Receive(j, LIST, size, size)), name)
    blinded.append(_elements(lists[-1]))
    positions = positions_in_all(blinded)
    yield from tell_count(terms, count, len(positions[-1]), minimum)
    for step in range(count, 0, -1):
        for j, name in enumerate(members):
            for owner in _due(step, j, count):
                yield Send(j, OPEN, _packed(positions[owner]))
                size = 4 * len(positions[owner])
                answer = yield Receive(j, OPEN, size, size)
                positions[owner] = _positions(answer, len(blinded[owner]), name)
    for j in range(count):
        yield Send(j, MATCHED, _packed(positions[j]))
    return blinder.rows(positions[-1], members[0])


def _elements(data: bytes) -> np.ndarray:
    """One entry an element, of a type that compares all its bytes."""
    return np.frombuffer(data, dtype=f"S{ELEMENT}")


def _packed(positions: np.ndarray) -> bytes:
    return positions.astype("<u4").tobytes()


def positions_in_all(lists: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Where the values that are in all lists lie in each of them, in the order of the values."""
    orders = [np.argsort(values) for values in lists]
    ordered = [values[order] for values, order in zip(lists, orders, strict=True)]
    common = ordered[0]
    for values in ordered[1:]:
        if len(values):
            places = np.minimum(np.searchsorted(values, common), len(values) - 1)
            common = common[values[places] == common]
        else:
            common = values
    return [order[np.searchsorted(values, common)] for values, order in zip(ordered, orders, strict=True)]
