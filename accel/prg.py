"""AES-256-CTR as a stream of words: the only source of masks and of noise (OpenSSL through ``cryptography``)."""

from __future__ import annotations

import os
import sys

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from accel.errors import InvalidArgument

__all__ = ["BLOCK", "KEY_BYTES", "NONCE_BYTES", "Stream", "StreamKey"]

KEY_BYTES = 32
NONCE_BYTES = 8  # the other eight bytes of the block count blocks: 2^64 of them never run into the next nonce

BLOCK = 16
_RESERVE = 1 << 63  # the first block of the reserves
_LONG = 1 << 15  # bytes of one draw from which on a counter-mode context pays
_ZEROS = np.zeros(1 << 18, dtype=np.uint8)
_COUNTERS = np.arange(_ZEROS.size // BLOCK, dtype=">u8").view(np.uint64)


class StreamKey:
    """A key, expanded once. Many short streams under one key then cost no key schedule each. For one thread."""

    __slots__ = ("_cipher", "_encrypt", "_input", "_numbered")

    def __init__(self, key: bytes):
        if len(key) != KEY_BYTES:
            raise InvalidArgument(f"a stream takes a key of {KEY_BYTES} bytes, got {len(key)}")
        self._cipher = algorithms.AES(key)
        self._encrypt: CipherContext = Cipher(self._cipher, modes.ECB()).encryptor()
        self._prepare(64)

    def _prepare(self, count: int) -> None:
        """Blocks (nonce, number) for the numbers below ``count``; the nonces are filled in when they are used."""
        self._numbered = np.empty((count, 2), dtype=np.uint64)
        self._numbered[:, 1] = _COUNTERS[:count]
        self._input = self._numbered.data.cast("B")

    def blocks(self, nonce: int, first: int, count: int) -> np.ndarray:
        """Blocks ``first`` to ``first + count`` of the key stream, of those that the table counts."""
        end = first + count
        if end > len(self._numbered):
            self._prepare(min(2 * end, _COUNTERS.size))
        self._numbered[first:end, 0] = nonce
        out = np.empty((count + 1) * BLOCK, dtype=np.uint8)  # the library asks for a spare block
        self._encrypt.update_into(self._input[BLOCK * first : BLOCK * end], out.data)
        return out

    def encrypt(self, blocks: np.ndarray, out: np.ndarray) -> None:
        """Blocks (nonce, number) of the caller's, encrypted into ``out``, which is one block longer."""
        self._encrypt.update_into(blocks.data.cast("B"), out.data)

    def counting(self, nonce: bytes, first: int) -> CipherContext:
        """The same key stream from block ``first`` on, without end."""
        return Cipher(self._cipher, modes.CTR(nonce + first.to_bytes(BLOCK - NONCE_BYTES, "big"))).encryptor()


class Stream:
    """A pseudo-random stream: AES-256-CTR under ``key``, starting at block (nonce, 0).

    Two streams with the same key and different 8-byte nonces never share a block. The stream is sequential: each call
    continues where the last one stopped. Short draws from its first 256 KiB are computed block by block from the key
    that is expanded already, everything else by a counter-mode context of its own.
    """

    __slots__ = ("_context", "_first", "_key", "_nonce", "_word", "position")

    def __init__(self, key: bytes | StreamKey, nonce: bytes = bytes(NONCE_BYTES), first: int = 0):
        if len(nonce) != NONCE_BYTES:
            raise InvalidArgument(f"a stream takes a nonce of {NONCE_BYTES} bytes, got {len(nonce)}")
        self._key = key if isinstance(key, StreamKey) else StreamKey(key)
        self._nonce = nonce
        self._word = int.from_bytes(nonce, sys.byteorder)
        self._first = first  # block
        self.position = 0  # bytes drawn so far
        self._context: CipherContext | None = None

    @staticmethod
    def random_key() -> bytes:
        """A fresh key from the operating system."""
        return os.urandom(KEY_BYTES)

    def bytes(self, count: int) -> np.ndarray:
        """The next ``count`` bytes as uint8."""
        if count == 0:
            return np.empty(0, dtype=np.uint8)
        begin = self.position
        self.position = end = begin + count
        if self._context is None and self._first == 0 and end <= _ZEROS.size and count < _LONG:
            first = begin // BLOCK
            blocks = self._key.blocks(self._word, first, -(-end // BLOCK) - first)
            return blocks[begin - first * BLOCK : end - first * BLOCK]
        if self._context is None:
            self._context = self._key.counting(self._nonce, self._first + begin // BLOCK)
            self._counted(begin % BLOCK)
        return self._counted(count)

    def _counted(self, count: int) -> np.ndarray:
        assert self._context is not None
        out = np.empty(count, dtype=np.uint8)
        for start in range(0, count, _ZEROS.size):
            piece = out[start : start + _ZEROS.size]
            self._context.update_into(memoryview(_ZEROS[: piece.size]), memoryview(piece))  # type: ignore[arg-type]
        return out

    def reserve(self, begin: int) -> Stream:
        """Blocks of the same key and nonce that no draw reaches, for a draw that began at byte ``begin`` and needs more
        bytes than it took. So what follows it in the stream does not depend on how many it needs."""
        if self._first:
            raise InvalidArgument("a reserve has no reserve of its own: both would be the same blocks")
        return Stream(self._key, self._nonce, _RESERVE + (begin << 24))

    def words(self, count: int) -> np.ndarray:
        """The next ``count`` words, uniform over 0..2^64-1."""
        words = self.bytes(8 * count).view(np.uint64)
        return words if words.flags.aligned else words.copy()

    def rows(self, rows: int, count: int) -> np.ndarray:
        """The next ``rows``·``count`` words: several vectors of masks in one go."""
        return self.words(rows * count).reshape(rows, count)
