"""Kernels of the matching of rows in numba; ``accel.reference.oprf`` explains them."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from accel.reference.oprf import BLAKE_START, BLAKE_WORDS, CHECKS, DENSE

__all__ = [
    *("check_sums", "code_into", "decode_rows", "decode_values", "dense_tables", "fill_back", "hash_into_bins"),
    *("key_rows", "match_tags", "oracle", "peel", "transpose_bits"),
]

_BYTES = DENSE // 8
_LOW = np.uint64(0xFFFFFFFF)
_BYTE = np.uint64(255)
_START = tuple(np.uint64(word) for word in BLAKE_START)
_MIXED = (
    (0, 4, 8, 12),
    (1, 5, 9, 13),
    (2, 6, 10, 14),
    (3, 7, 11, 15),
    (0, 5, 10, 15),
    (1, 6, 11, 12),
    (2, 7, 8, 13),
    (3, 4, 9, 14),
)


@intrinsic
def _twelve_rounds(_typing: Any, state: Any, message: Any, count: Any, last: Any) -> Any:
    """The compression of BLAKE2b (RFC 7693, §3.2). Written out, because a loop over its table of indices is three times
    slower."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)

        def turned(value: Any, by: int) -> Any:
            return builder.or_(
                builder.lshr(value, ir.Constant(word, by)), builder.shl(value, ir.Constant(word, 64 - by))
            )

        before = cgutils.unpack_tuple(builder, arguments[0])
        words = cgutils.unpack_tuple(builder, arguments[1])
        v = [*before, *(ir.Constant(word, value) for value in BLAKE_START)]
        v[12] = builder.xor(v[12], arguments[2])
        v[14] = builder.xor(v[14], arguments[3])
        for turn in range(12):
            order = BLAKE_WORDS[turn % 10]
            for place, (a, b, c, d) in enumerate(_MIXED):
                for half, (by, then) in enumerate(((32, 24), (16, 63))):
                    v[a] = builder.add(builder.add(v[a], v[b]), words[order[2 * place + half]])
                    v[d] = turned(builder.xor(v[d], v[a]), by)
                    v[c] = builder.add(v[c], v[d])
                    v[b] = turned(builder.xor(v[b], v[c]), then)
        after = [builder.xor(builder.xor(before[i], v[i]), v[i + 8]) for i in range(8)]
        return context.make_tuple(builder, signature.return_type, after)

    return types.UniTuple(types.uint64, 8)(state, message, types.uint64, types.uint64), generate


@njit(nogil=True)
def _compress(h, m, count, last):
    after: Any = _twelve_rounds(  # type: ignore[call-arg]
        (h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]),
        (m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7], m[8], m[9], m[10], m[11], m[12], m[13], m[14], m[15]),
        np.uint64(count),
        ~np.uint64(0) if last else np.uint64(0),
    )
    for i in range(8):
        h[i] = after[i]


@njit(nogil=True)
def _keyed(key, digest, h, m):
    """The state after the block of a key of 16 bytes, which is the same for all messages."""
    for i in range(8):
        h[i] = _START[i]
    for i in range(16):
        m[i] = np.uint64(0)
    h[0] ^= np.uint64(0x01010000) ^ np.uint64(16 << 8) ^ np.uint64(digest)
    m[0] = key[0]
    m[1] = key[1]
    _compress(h, m, 128, False)


@njit(cache=True, nogil=True)
def hash_into_bins(data, offsets, first, key, records, filled):
    bins, capacity = records.shape[0], records.shape[1]
    start, h, m = np.empty(8, np.uint64), np.empty(8, np.uint64), np.empty(16, np.uint64)
    _keyed(key, 64, start, m)
    block = m.view(np.uint8)
    for i in range(len(offsets) - 1):
        for j in range(8):
            h[j] = start[j]
        at, end, count = offsets[i], offsets[i + 1], 128
        while True:
            take = min(end - at, 128)
            for j in range(16):
                m[j] = np.uint64(0)
            for j in range(take):
                block[j] = data[at + j]
            at += take
            count += take
            _compress(h, m, count, at >= end)
            if at >= end:
                break
        b = np.int64(((h[3] >> np.uint64(32)) * np.uint64(bins)) >> np.uint64(32))
        place = filled[b]
        if place == capacity:
            return b
        for j in range(5):
            records[b, place, j] = h[j]
        records[b, place, 3] = (h[3] & _LOW) | np.uint64(first + i) << np.uint64(32)
        filled[b] = place + 1
    return -1


@njit(cache=True, nogil=True)
def oracle(keys, key, out):
    start, h, m = np.empty(8, np.uint64), np.empty(8, np.uint64), np.empty(16, np.uint64)
    _keyed(key, 32, start, m)
    for i in range(16):
        m[i] = np.uint64(0)
    for i in range(len(keys)):
        for j in range(8):
            h[j] = start[j]
            m[j] = keys[i, j]
        _compress(h, m, 192, True)
        for j in range(4):
            out[i, j] = h[j]


@njit(inline="always")
def _columns(low, high, m):
    a = np.int64(((low & _LOW) * np.uint64(m)) >> np.uint64(32))
    b = np.int64(((low >> np.uint64(32)) * np.uint64(m - 1)) >> np.uint64(32))
    c = np.int64(((high & _LOW) * np.uint64(m - 2)) >> np.uint64(32))
    b += b >= a
    c += c >= min(a, b)
    c += c >= max(a, b)
    return a, b, c


@njit(cache=True, nogil=True)
def peel(records, m, columns, degree, met, order, own):
    n = len(records)
    for c in range(m):
        degree[c] = 0
        met[c] = 0
    for i in range(n):
        columns[i, 0], columns[i, 1], columns[i, 2] = _columns(records[i, 2], records[i, 3], m)
        for k in range(3):
            degree[columns[i, k]] += 1
            met[columns[i, k]] ^= i
    done, top, waiting = 0, 0, np.empty(m, np.int32)
    for c in range(m):
        if degree[c] == 1:
            waiting[top] = c
            top += 1
    while top:
        top -= 1
        c = waiting[top]
        if degree[c] != 1:
            continue
        i = met[c]
        order[done] = i
        own[done] = c
        done += 1
        for k in range(3):
            j = columns[i, k]
            degree[j] -= 1
            met[j] ^= i
            if degree[j] == 1:
                waiting[top] = j
                top += 1
    return done


@njit(cache=True, nogil=True)
def fill_back(records, values, columns, order, own, done, m, store):
    for k in range(done - 1, -1, -1):
        i, c = order[k], own[k]
        bits, v0, v1 = records[i, 4], values[i, 0], values[i, 1]
        for q in range(DENSE):
            chosen = np.uint64(0) - ((bits >> np.uint64(q)) & np.uint64(1))
            v0 ^= store[m + q, 0] & chosen
            v1 ^= store[m + q, 1] & chosen
        for q in range(3):
            j = columns[i, q]
            if j != c:
                v0 ^= store[j, 0]
                v1 ^= store[j, 1]
        store[c, 0] = v0
        store[c, 1] = v1


@njit(cache=True, nogil=True)
def decode_values(records, store, m, out):
    for i in range(len(records)):
        a, b, c = _columns(records[i, 2], records[i, 3], m)
        bits = records[i, 4]
        v0 = store[a, 0] ^ store[b, 0] ^ store[c, 0]
        v1 = store[a, 1] ^ store[b, 1] ^ store[c, 1]
        for q in range(DENSE):
            chosen = np.uint64(0) - ((bits >> np.uint64(q)) & np.uint64(1))
            v0 ^= store[m + q, 0] & chosen
            v1 ^= store[m + q, 1] & chosen
        out[i, 0] ^= v0
        out[i, 1] ^= v1


@njit(cache=True, nogil=True)
def dense_tables(store, m, tables):
    for g in range(_BYTES):
        for j in range(8):
            tables[g, 0, j] = np.uint64(0)
        for v in range(1, 256):
            low = 0
            while not (v >> low) & 1:
                low += 1
            for j in range(8):
                tables[g, v, j] = tables[g, v & (v - 1), j] ^ store[m + 8 * g + low, j]


@njit(cache=True, nogil=True)
def decode_rows(records, store, m, tables, delta, code, out):
    holder = np.any(delta != np.uint64(0))
    for i in range(len(records)):
        a, b, c = _columns(records[i, 2], records[i, 3], m)
        bits, o = records[i, 4], out[i]
        for j in range(8):
            o[j] = np.uint64(0)
        if holder:
            for w in range(2):
                value = records[i, w]
                for g in range(8):
                    t = code[8 * w + g, np.int64((value >> np.uint64(8 * g)) & _BYTE)]
                    for j in range(8):
                        o[j] ^= t[j]
            for j in range(8):
                o[j] &= delta[j]
        for j in range(8):
            o[j] ^= store[a, j] ^ store[b, j] ^ store[c, j]
        for g in range(_BYTES):
            t = tables[g, np.int64((bits >> np.uint64(8 * g)) & _BYTE)]
            for j in range(8):
                o[j] ^= t[j]


@njit(cache=True, nogil=True)
def code_into(values, code, rows):
    for i in range(len(values)):
        o = rows[i]
        for w in range(2):
            value = values[i, w]
            for g in range(8):
                t = code[8 * w + g, np.int64((value >> np.uint64(8 * g)) & _BYTE)]
                for j in range(8):
                    o[j] ^= t[j]


@njit(cache=True, nogil=True)
def transpose_bits(columns, rows):
    x = np.empty(64, np.uint64)
    for block in range(8):
        for w in range(columns.shape[1]):
            for k in range(64):
                x[k] = columns[64 * block + k, w]
            mask, j = _LOW, 32
            while j:
                k = 0
                while k < 64:
                    t = ((x[k] >> np.uint64(j)) ^ x[k + j]) & mask
                    x[k] ^= t << np.uint64(j)
                    x[k + j] ^= t
                    k = (k + j + 1) & ~j
                j >>= 1
                mask ^= mask << np.uint64(j)
            for k in range(64):
                rows[64 * w + k, block] = x[k]


@njit(cache=True, nogil=True)
def key_rows(rows, difference, delta):
    for i in range(len(rows)):
        for j in range(8):
            rows[i, j] ^= delta[j] & difference[i, j]


@njit(cache=True, nogil=True)
def check_sums(rows, chosen, out):
    count, width = len(chosen), rows.shape[1]
    sums = np.zeros((16, 256, width), np.uint64)
    for i in range(count):
        for w in range(2):
            bits = chosen[i, w]
            for g in range(8):
                t = sums[8 * w + g, np.int64((bits >> np.uint64(8 * g)) & _BYTE)]
                for j in range(width):
                    t[j] ^= rows[i, j]
    for s in range(CHECKS):
        for j in range(width):
            out[s, j] = rows[count + s, j]
        for v in range(256):
            if (v >> (s & 7)) & 1:
                for j in range(width):
                    out[s, j] ^= sums[s >> 3, v, j]


@njit(cache=True, nogil=True)
def match_tags(mine, theirs, table, found):
    size = len(table)
    table[:] = -1
    for i in range(len(mine)):
        s = np.int64(mine[i, 0] & np.uint64(size - 1))
        while table[s] >= 0:
            s = (s + 1) & (size - 1)
        table[s] = i
    for k in range(len(theirs)):
        found[k] = -1
        s = np.int64(theirs[k, 0] & np.uint64(size - 1))
        while table[s] >= 0:
            i = table[s]
            if mine[i, 0] == theirs[k, 0] and mine[i, 1] == theirs[k, 1]:
                found[k] = i
                break
            s = (s + 1) & (size - 1)
