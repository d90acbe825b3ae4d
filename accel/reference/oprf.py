"""Kernels of the matching of rows (``vfl.alignment.oprf``), with Python's integers and hashlib: slow, and easy to
compare with the proofs.

A *record* is an id in five words: its value H (two), the hash that its three sparse columns follow from (96 bits), its
row (32 bits), its 48 dense bits. A *store* over GF(2) has m sparse lines and 48 dense ones; an id has the sum of those
that its record chooses, ⟨row, store⟩ in the proofs. Rows of 512 bits are eight words, bit i of a row being bit i mod 64
of word i // 64. Nothing here decides by a secret that another client must not learn: all secrets are this client's own.
"""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = [
    *("check_sums", "code_into", "decode_rows", "decode_values", "dense_tables", "fill_back", "hash_into_bins"),
    *("key_rows", "match_tags", "oracle", "peel", "transpose_bits"),
]

DENSE = 48
CHECKS = 128
BLAKE_START = (
    *(0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1),
    *(0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179),
)
BLAKE_WORDS = (
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
    (14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3),
    (11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4),
    (7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8),
    (9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13),
    (2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9),
    (12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11),
    (13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10),
    (6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5),
    (10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0),
)


def hash_into_bins(
    data: np.ndarray, offsets: np.ndarray, first: int, key: np.ndarray, records: np.ndarray, filled: np.ndarray
) -> int:
    """BLAKE2b-512 of every id (none is empty) data[offsets[i] : offsets[i + 1]] under the key of 16 bytes, as a record
    (row ``first + i``) at the end of its bin. The first bin that had no room, or −1; ``filled`` counts the records of
    each bin."""
    text = data.tobytes()
    for i, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        words = np.frombuffer(hashlib.blake2b(text[begin:end], key=key.tobytes()).digest(), np.uint64)
        chosen = (int(words[3]) >> 32) * len(records) >> 32
        if filled[chosen] == records.shape[1]:
            return chosen
        records[chosen, filled[chosen]] = words[:5]
        records[chosen, filled[chosen], 3] = int(words[3]) & 0xFFFFFFFF | first + i << 32
        filled[chosen] += 1
    return -1


def oracle(keys: np.ndarray, key: np.ndarray, out: np.ndarray) -> None:
    """out[i] = BLAKE2b-256 of the 64 bytes of keys[i], under the key of 16 bytes."""
    for row, taken in zip(out, keys, strict=True):
        row[:] = np.frombuffer(hashlib.blake2b(taken.tobytes(), key=key.tobytes(), digest_size=32).digest(), np.uint64)


def _columns(record: np.ndarray, m: int) -> list[int]:
    """Three different columns below m."""
    low, high = int(record[2]), int(record[3])
    found: list[int] = []
    for taken, word in enumerate((low & 0xFFFFFFFF, low >> 32, high & 0xFFFFFFFF)):
        column = word * (m - taken) >> 32
        for other in sorted(found):
            column += column >= other
        found.append(column)
    return found


def peel(
    records: np.ndarray,
    m: int,
    columns: np.ndarray,
    degree: np.ndarray,
    met: np.ndarray,
    order: np.ndarray,
    own: np.ndarray,
) -> int:
    """Take away, again and again, a record that has a column to itself: the k-th is order[k], with column own[k]. How
    many went; what is left has no such column. ``degree`` and ``met`` (m) are scratch, ``columns[i]`` becomes the three
    columns of record i."""
    degree[:m] = 0
    met[:m] = 0
    for i, record in enumerate(records):
        columns[i] = _columns(record, m)
        for c in columns[i]:
            degree[c] += 1
            met[c] ^= i
    done, waiting = 0, [c for c in range(m) if degree[c] == 1]
    while waiting:
        c = waiting.pop()
        if degree[c] != 1:
            continue
        i = int(met[c])
        order[done], own[done] = i, c
        done += 1
        for j in columns[i]:
            degree[j] -= 1
            met[j] ^= i
            if degree[j] == 1:
                waiting.append(int(j))
    return done


def _line(record: np.ndarray, columns: list[int], m: int) -> list[int]:
    return [*columns, *(m + q for q in range(DENSE) if int(record[4]) >> q & 1)]


def fill_back(
    records: np.ndarray,
    values: np.ndarray,
    columns: np.ndarray,
    order: np.ndarray,
    own: np.ndarray,
    done: int,
    m: int,
    store: np.ndarray,
) -> None:
    """Set the own column of every peeled record, the last first, so that ⟨row of record i, store⟩ = values[i] (128
    bits)."""
    for k in range(done - 1, -1, -1):
        i, c = int(order[k]), int(own[k])
        others = [j for j in _line(records[i], columns[i].tolist(), m) if j != c]
        store[c] = values[i] ^ np.bitwise_xor.reduce(store[others], axis=0)


def decode_values(records: np.ndarray, store: np.ndarray, m: int, out: np.ndarray) -> None:
    """out[i] ^= ⟨row of record i, store⟩, for a store of 128 bits."""
    for i, record in enumerate(records):
        out[i] ^= np.bitwise_xor.reduce(store[_line(record, _columns(record, m), m)], axis=0)


def dense_tables(store: np.ndarray, m: int, tables: np.ndarray) -> None:
    """tables[g, v] = the sum of those of the eight dense lines from 8·g on that the bits of v choose (512 bits)."""
    for g in range(DENSE // 8):
        for v in range(256):
            chosen = [m + 8 * g + bit for bit in range(8) if v >> bit & 1]
            tables[g, v] = np.bitwise_xor.reduce(store[chosen], axis=0)


def decode_rows(
    records: np.ndarray,
    store: np.ndarray,
    m: int,
    tables: np.ndarray,
    delta: np.ndarray,
    code: np.ndarray,
    out: np.ndarray,
) -> None:
    """out[i] = ⟨row of record i, store⟩ ⊕ (delta ∧ C(H)), for a store of 512 bits; delta = 0 is the evaluator's."""
    coded = np.zeros_like(out)
    code_into(records[:, :2], code, coded)
    for i, record in enumerate(records):
        line = np.bitwise_xor.reduce(store[_line(record, _columns(record, m), m)], axis=0)
        out[i] = line ^ (delta & coded[i])


def code_into(values: np.ndarray, code: np.ndarray, rows: np.ndarray) -> None:
    """rows[i] ^= C(values[i]): the linear code, 128 to 512 bits, by a table for each byte (only the first rows of
    ``rows``)."""
    for i, value in enumerate(np.ascontiguousarray(values).view(np.uint8).reshape(len(values), 16)):
        rows[i] ^= np.bitwise_xor.reduce(code[np.arange(16), value], axis=0)


def transpose_bits(columns: np.ndarray, rows: np.ndarray) -> None:
    """Bit c of rows[r] = bit r of columns[c], of 512 columns."""
    bits = np.unpackbits(columns.view(np.uint8), axis=1, bitorder="little").T
    rows[:] = np.packbits(np.ascontiguousarray(bits), axis=1, bitorder="little").view(np.uint64)


def key_rows(rows: np.ndarray, difference: np.ndarray, delta: np.ndarray) -> None:
    """rows ^= delta ∧ difference, row by row."""
    rows ^= delta & difference


def check_sums(rows: np.ndarray, chosen: np.ndarray, out: np.ndarray) -> None:
    """out[s] = the sum of the rows i whose bit s of chosen[i] (128 bits) is set, and of row len(chosen) + s, which
    masks it."""
    bits = np.unpackbits(chosen.view(np.uint8), axis=1, bitorder="little").astype(bool)
    for s in range(CHECKS):
        masked = rows[len(chosen) + s]
        out[s] = masked ^ np.bitwise_xor.reduce(rows[: len(chosen)][bits[:, s]], axis=0)


def match_tags(mine: np.ndarray, theirs: np.ndarray, table: np.ndarray, found: np.ndarray) -> None:
    """found[k] = which of ``mine`` (two words each) equals theirs[k], or −1. ``table`` is scratch of a power of two of
    words, more than there are in ``mine``."""
    place = {row.tobytes(): i for i, row in reversed(list(enumerate(mine)))}
    found[:] = [place.get(row.tobytes(), -1) for row in theirs]
