"""An oblivious pseudo-random function between two clients: the evaluator gets F on its own ids, the holder can compute
F everywhere.

From the keys of 512 base transfers (``base_ot``) both draw AES-128 in counter mode, a column a key and bin after bin.
The evaluator's columns for bits 0 and 1 are T⁰ and T¹, read as rows of 512 bits; P is the store of its ids' hashes
(``okvs``), C a linear code. It sends U = T⁰ ⊕ T¹ ⊕ C(P). The holder, whose columns are T^Δ, has K = T^Δ ⊕ Δ∧U = T⁰ ⊕
Δ∧C(P), row by row. Store lines add up without carries, so ⟨row(x), K⟩ ⊕ Δ∧C(H(x)) = ⟨row(x), T⁰⟩ if and only if P holds
H(x): F(x) is a hash of that (PaXoS, eprint 2020/193).

The check: a sum of the rows, chosen by a hash of U, must fit on both sides. Whoever flips bits of U to learn bits of Δ
from what still matches is refused with probability 1/2 for every bit.

*What one corrupted holder sees*: U, of which every column has a stream on it that it does not know. *What one corrupted
evaluator sees*: of an id that is not in P, F is a hash with at least 128 unknown bits of Δ in it: guessing a phone
number costs a guess of Δ. A key is never used twice: streams only go forward, and each attempt has base transfers of
its own (docs/proofs §10.2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from accel import kernels
from accel.prg import KEY_BYTES, Stream
from accel.reference.oprf import CHECKS, DENSE
from vfl.alignment.okvs import Shape
from vfl.alignment.steps import AlignmentRefused, Randomness

__all__ = [
    *(
        "CODE",
        "Columns",
        "Evaluator",
        "Holder",
        "Uniform",
        "bits_of",
        "function_values",
        "message_bytes",
        "message_parts",
    ),
    "rows_of_the_check",
]

_ZEROS = bytes(1 << 20)
_CHECK_BYTES = CHECKS * (64 + 16)


def _code() -> np.ndarray:
    """The generator of a random linear code, [512, 128], as a table for each byte of a word."""
    generator = hashlib.shake_256(b"ppvfl alignment: a random linear [512, 128] code").digest(128 * 64)
    lines = np.frombuffer(generator, np.uint64).reshape(16, 8, 8)
    table = np.zeros((16, 256, 8), np.uint64)
    for value in range(1, 256):
        low = (value & -value).bit_length() - 1
        table[:, value] = table[:, value & (value - 1)] ^ lines[:, low]
    return table


CODE = _code()
_NOTHING = np.zeros(8, np.uint64)


def _counting(key: bytes) -> Cipher[modes.CTR]:
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16)))


class Columns:
    """512 streams that only go forward: one bin after the other."""

    def __init__(self, keys: Sequence[bytes], shape: Shape):
        self._streams = [_counting(key).encryptor() for key in keys]
        self._words = shape.lines // 64

    def draw(self) -> np.ndarray:
        found = np.empty((len(self._streams), self._words), np.uint64)
        for stream, line in zip(self._streams, found, strict=True):
            stream.update_into(_ZEROS[: line.nbytes], line.data.cast("B"))
        return found


class Uniform:
    """Lines that nobody else can foresee: what a store has where no id wants anything, and tags of no id."""

    def __init__(self, randomness: Randomness):
        self._stream = Stream(randomness(KEY_BYTES))

    def draw(self, *shape: int) -> np.ndarray:
        return self._stream.words(int(np.prod(shape))).reshape(shape)


def message_bytes(shape: Shape) -> int:
    """Bytes of one bin, from evaluator to holder."""
    return 64 * shape.lines + _CHECK_BYTES


def message_parts(message: np.ndarray, shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """U and the two sums of the check."""
    words = message.view(np.uint64)
    body, sums = 8 * shape.lines, 8 * CHECKS
    return (
        words[:body].reshape(-1, 8),
        words[body : body + sums].reshape(-1, 8),
        words[body + sums :].reshape(-1, 2),
    )


def rows_of_the_check(label: bytes, number: int, difference: np.ndarray) -> np.ndarray:
    """Which rows go into which of the 128 sums: by a hash of U, so that it was fixed before."""
    hashed = hashlib.blake2b(label, digest_size=16, person=b"ppvfl check")
    hashed.update(number.to_bytes(8, "little"))
    hashed.update(difference.data.cast("B"))
    found = np.zeros((len(difference) - CHECKS, 2), np.uint64)
    _counting(hashed.digest()).encryptor().update_into(bytes(found.nbytes), found.data.cast("B"))
    return found


def function_values(records: np.ndarray, rows: np.ndarray, shape: Shape, delta: np.ndarray, label: bytes) -> np.ndarray:
    """F of every record: 256 bits, the hash under ``label`` of its row."""
    tables = np.empty((DENSE // 8, 256, 8), np.uint64)
    kernels.dense_tables(rows, shape.sparse, tables)
    keys = np.empty((len(records), 8), np.uint64)
    kernels.decode_rows(records, rows, shape.sparse, tables, delta, CODE, keys)
    found = np.empty((len(records), 4), np.uint64)
    kernels.oracle(keys, np.frombuffer(label[:16], np.uint64).copy(), found)
    return found


class Evaluator:
    """The client whose ids are in P; ``shape`` is that of its list."""

    def __init__(self, pairs: Sequence[tuple[bytes, bytes]], label: bytes, shape: Shape):
        self._zero = Columns([pair[0] for pair in pairs], shape)
        self._one = Columns([pair[1] for pair in pairs], shape)
        self._label, self._shape = label, shape

    def draw(self) -> tuple[np.ndarray, np.ndarray]:
        """Draw of the next bin."""
        return self._zero.draw(), self._one.draw()

    def extend(
        self, number: int, drawn: tuple[np.ndarray, np.ndarray], store: np.ndarray, records: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """F of the own records of a bin, and what the holder is sent. ``store``: P, all its lines."""
        message = np.empty(message_bytes(self._shape), np.uint8)
        difference, sums, stored = message_parts(message, self._shape)
        zero, one = drawn
        rows = np.empty_like(difference)
        kernels.transpose_bits(zero, rows)
        np.bitwise_xor(one, zero, out=one)
        kernels.transpose_bits(one, difference)
        kernels.code_into(store, CODE, difference)
        chosen = rows_of_the_check(self._label, number, difference)
        kernels.check_sums(rows, chosen, sums)
        kernels.check_sums(store, chosen, stored)
        return function_values(records, rows, self._shape, _NOTHING, self._label), message


class Holder:
    """The client that knows Δ; ``shape`` is that of the evaluator's list, ``name`` the evaluator."""

    def __init__(self, delta: bytes, keys: Sequence[bytes], label: bytes, shape: Shape, name: str):
        self._delta = np.frombuffer(delta, np.uint64).copy()
        self._columns = Columns(keys, shape)
        self._label, self._shape, self._name = label, shape, name

    def draw(self) -> np.ndarray:
        """Draw of the next bin."""
        return self._columns.draw()

    def extend(self, number: int, drawn: np.ndarray, message: bytearray, records: np.ndarray) -> np.ndarray:
        """F of the own records of a bin, after the check of what the evaluator sent."""
        difference, sums, stored = message_parts(np.frombuffer(message, np.uint8), self._shape)
        rows = np.empty((self._shape.lines, 8), np.uint64)
        kernels.transpose_bits(drawn, rows)
        kernels.key_rows(rows, difference, self._delta)
        due = np.empty((CHECKS, 8), np.uint64)
        kernels.check_sums(rows, rows_of_the_check(self._label, number, difference), due)
        coded = np.zeros_like(due)
        kernels.code_into(stored, CODE, coded)
        if not np.array_equal(due, sums ^ (coded & self._delta)):
            raise AlignmentRefused(
                f"client {self._name!r} failed the consistency check of bin {number}: it deviates or its memory is "
                f"faulty; "
                "not tried again"
            )
        return function_values(records, rows, self._shape, self._delta, self._label)


def bits_of(delta: bytes) -> list[int]:
    """Δ as 512 bits, in the order of the columns."""
    return np.unpackbits(np.frombuffer(delta, np.uint8), bitorder="little").tolist()
