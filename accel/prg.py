"""AES-256-CTR as a stream of words: the only source of masks and of noise (OpenSSL through ``cryptography``)."""

from __future__ import annotations

import os

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

__all__ = ["KEY_BYTES", "NONCE_BYTES", "Stream"]

KEY_BYTES = 32
NONCE_BYTES = 8  # the other eight bytes of the block count blocks: 2^64 of them never run into the next nonce

_ZEROS = np.zeros(1 << 18, dtype=np.uint8)


class Stream:
    """A pseudo-random stream: AES-256-CTR under ``key``, starting at block (nonce, 0).

    Two streams with the same key and different 8-byte nonces never share a block. The stream is sequential:
    each call continues where the last one stopped.
    """

    def __init__(self, key: bytes, nonce: bytes = bytes(NONCE_BYTES)):
        if len(key) != KEY_BYTES or len(nonce) != NONCE_BYTES:
            raise ValueError(f"a stream takes a key of {KEY_BYTES} and a nonce of {NONCE_BYTES} bytes")
        counter = nonce + bytes(16 - NONCE_BYTES)
        self._context: CipherContext = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()

    @staticmethod
    def random_key() -> bytes:
        """A fresh key from the operating system."""
        return os.urandom(KEY_BYTES)

    def bytes(self, count: int) -> np.ndarray:
        """The next ``count`` bytes as uint8."""
        out = np.empty(count, dtype=np.uint8)
        for start in range(0, count, _ZEROS.size):
            piece = out[start : start + _ZEROS.size]
            self._context.update_into(memoryview(_ZEROS[: piece.size]), memoryview(piece))  # type: ignore[arg-type]
        return out

    def words(self, count: int) -> np.ndarray:
        """The next ``count`` words, uniform over 0..2^64-1."""
        return self.bytes(8 * count).view(np.uint64)
