"""The masks of a recorded step: all its draws as prepared counter blocks, two columns each, (nonce, number of the block).

The nonce of an operation is (step, number), so a repetition adds its own step and first number to what was recorded, and
has the same bits as the streams of ``accel.prg`` would give it. OpenSSL is the only AES, here as there.
"""

from __future__ import annotations

import numpy as np

from accel.prg import BLOCK, StreamKey

__all__ = ["Draws"]

_BLOCKS = 1 << 12  # of one piece: 64 KB, which stays in the second-level cache


class _Piece:
    """Counter blocks under one key, and the memory that the masks lie in."""

    def __init__(self, capacity: int):
        self.used = 0
        self.numbers = np.empty(capacity, dtype=np.uint64)  # of operations, in the upper half of the word
        self.blocks = np.empty((capacity, 2), dtype=np.uint64)
        self.masks = np.empty((capacity + 1) * BLOCK, dtype=np.uint8)  # the library asks for a spare block


class Draws:
    """All draws of a program, under the keys shared with both neighbours."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[_Piece]] = {"next": [], "previous": []}
        self.size = 0  # bytes of memory

    def place(self, side: str, number: int, begin: int, count: int) -> np.ndarray:
        """Memory for bytes ``begin`` to ``begin + count`` of the stream of operation ``number`` (counted in the step)."""
        first = begin // BLOCK
        blocks = -(-(begin + count) // BLOCK) - first
        pieces = self._pieces[side]
        if not pieces or pieces[-1].used + blocks > len(pieces[-1].numbers):
            pieces.append(_Piece(max(_BLOCKS, blocks)))
            self.size += pieces[-1].masks.nbytes + pieces[-1].blocks.nbytes + pieces[-1].numbers.nbytes
        piece = pieces[-1]
        start, stop = piece.used, piece.used + blocks
        piece.used = stop
        piece.numbers[start:stop] = number << 32
        piece.blocks[start:stop, 1] = np.arange(first, first + blocks, dtype=">u8").view(np.uint64)
        offset = start * BLOCK + begin % BLOCK
        return piece.masks[offset : offset + count]

    def draw(self, keys: dict[str, StreamKey], step: int, begun: int) -> None:
        """Fill the memory with the masks of a step whose first operation follows number ``begun``."""
        word = np.uint64(step + (begun << 32))
        for side, pieces in self._pieces.items():
            for piece in pieces:
                used = piece.used
                np.add(piece.numbers[:used], word, out=piece.blocks[:used, 0])
                keys[side].encrypt(piece.blocks[:used], piece.masks)
