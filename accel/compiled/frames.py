"""One round over connected sockets in one compiled call: frames to some peers, frames from some, without the
interpreter.

``sendmsg`` for every frame that goes out, then ``recvmsg`` for every one that comes in, with ``poll`` before it where
nothing is there yet. All memory is the caller's and laid out beforehand. What does not go as expected (a short write,
an error, another header than the one that must come, nothing for ``milliseconds``) ends the call: the caller goes on
from what has moved, and says what there is to say. ``refmpc.net.prepared`` describes frames and does the same in
Python.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import njit, types

__all__ = ["ROUND_SCRATCH", "carry_round", "has_compiled_rounds", "round_is_done"]

HEADER_WORDS = 8
_NOT_WAITING, _WITHOUT_SIGNAL, _READABLE, _MONOTONIC = 0x40, 0x4000, 1, 1  # Linux

has_compiled_rounds = sys.platform == "linux" and sys.byteorder == "little"
round_is_done = 1
ROUND_SCRATCH = 10  # words: a msghdr of 7, a pollfd, a timespec of 2

_sendmsg: Any = types.ExternalFunction("sendmsg", types.intp(types.int32, types.uintp, types.int32))
_recvmsg: Any = types.ExternalFunction("recvmsg", types.intp(types.int32, types.uintp, types.int32))
_poll: Any = types.ExternalFunction("poll", types.int32(types.uintp, types.uint64, types.int32))
_clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.uintp))


@njit(cache=True, nogil=True)
def _now(scratch):
    """Nanoseconds of the clock that ``time.monotonic_ns`` reads."""
    _clock_gettime(_MONOTONIC, scratch[8:].ctypes.data)
    return scratch[8] * np.uint64(1_000_000_000) + scratch[9]


@njit(cache=True, nogil=True)
def _receive(link, headers, place, vectors, scratch, moved, expected, totals, milliseconds):
    """Take one frame; whether all of it is here and it is the one that must come."""
    size = link[2] + 8 * HEADER_WORDS
    last = link[3] + link[4]
    at, inside, count = link[3], np.uint64(0), 0
    while True:
        saved_address, saved_length = vectors[at, 0], vectors[at, 1]
        vectors[at, 0] += inside
        vectors[at, 1] -= inside
        scratch[2] = vectors[at:].ctypes.data
        scratch[3] = np.uint64(last - at)
        got = _recvmsg(np.int32(link[0]), scratch.ctypes.data, np.int32(_NOT_WAITING))
        vectors[at, 0] = saved_address
        vectors[at, 1] = saved_length
        if got > 0:
            count += got
            moved[place] = count
            if count >= 8 * HEADER_WORDS and (headers[place, 0] != np.uint64(link[2]) or headers[place, 1] != expected):
                return False
            if count == size:
                return True
            left = np.uint64(got)
            while left >= vectors[at, 1] - inside:
                left -= vectors[at, 1] - inside
                at += 1
                inside = np.uint64(0)
            inside += left
        elif got == 0:
            return False
        begun = _now(scratch)
        scratch[7] = np.uint64(link[0]) | np.uint64(_READABLE << 32)
        ready = _poll(scratch[7:].ctypes.data, np.uint64(1), np.int32(milliseconds))
        totals[2] += np.int64(_now(scratch) - begun)
        if ready != 1 or scratch[7] >> np.uint64(48) != np.uint64(_READABLE):
            return False


@njit(cache=True, nogil=True)
def carry_round(links, sending, vectors, headers, counts, totals, moved, scratch, code, weight, base, milliseconds):
    """Send the frames of the first ``sending`` links, then take those of the others; ``round_is_done`` if all went
    well.

    A link is (file descriptor, its row in ``counts``, bytes of payload, its first buffer among ``vectors``, how many),
    a buffer (address, bytes), the first one of each link its header. ``counts`` are frames sent and received by peer,
    ``totals`` bytes and frames sent and nanoseconds waited. ``moved`` says for every link how many bytes have moved, −1
    when it is done and counted; its last entry is 1 while the round is under way. The code of the frames is ``code +
    weight·base[0]`` modulo 2^32.
    """
    number = links.shape[0]
    moved[number] = 1
    for k in range(number):
        moved[k] = 0
    full = (np.uint64(code) + np.uint64(weight) * base[0]) & np.uint64(0xFFFFFFFF)
    done = True
    for k in range(sending):
        place, size = links[k, 1], links[k, 2]
        counts[place, 0] += 1
        totals[0] += size
        totals[1] += 1
        headers[k, 0] = np.uint64(size)
        headers[k, 1] = (np.uint64(counts[place, 0]) & np.uint64(0xFFFFFFFF)) | full << np.uint64(32)
        headers[k, 2] = _now(scratch)
        scratch[2] = vectors[links[k, 3] :].ctypes.data
        scratch[3] = np.uint64(links[k, 4])
        went = _sendmsg(np.int32(links[k, 0]), scratch.ctypes.data, np.int32(_NOT_WAITING | _WITHOUT_SIGNAL))
        if went == size + 8 * HEADER_WORDS:
            moved[k] = -1
        else:
            moved[k] = max(went, 0)
            done = False
    for k in range(sending, number):
        if done:
            place = links[k, 1]
            expected = (np.uint64(counts[place, 1] + 1) & np.uint64(0xFFFFFFFF)) | full << np.uint64(32)
            done = _receive(links[k], headers, k, vectors, scratch, moved, expected, totals, milliseconds)
            if done:
                counts[place, 1] += 1
                moved[k] = -1
    if done:
        moved[number] = 0
        return round_is_done
    return 0
