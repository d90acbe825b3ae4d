"""The masks of a recorded step: all its draws as runs of counter blocks, two columns each, (nonce, number of the
block).

The nonce of an operation is (step, number), so a repetition adds its own step and first number to what was recorded,
and has the same bits as the streams of ``accel.prg`` would give it. OpenSSL is the only AES, here as there.
"""

from __future__ import annotations

import numpy as np

from accel import kernels
from accel.prg import BLOCK, StreamKey

__all__ = ["Draws"]

_BLOCKS = 1 << 13  # of one piece: 128 KB, which stay in the second-level cache


class _Piece:
    """Runs of counter blocks under one key, and the memory that the masks lie in."""

    def __init__(self, capacity: int):
        self.used = 0
        self.capacity = capacity
        self.noted: list[
            tuple[int, int, int]
        ] = []  # number of the operation in the upper half of a word, first block, count
        self.runs = np.empty((0, 3), dtype=np.uint64)
        self.masks = np.empty((capacity + 1) * BLOCK, dtype=np.uint8)  # the library asks for a spare block


class Draws:
    """All draws of a program, under the keys shared with both neighbours."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[_Piece]] = {"next": [], "previous": []}
        self._blocks = np.empty((_BLOCKS, 2), dtype=np.uint64)  # of one piece after the other
        self.size = self._blocks.nbytes  # bytes of memory

    def place(self, side: str, number: int, begin: int, count: int) -> np.ndarray:
        """Memory for bytes ``begin`` to ``begin + count`` of the stream of operation ``number`` (counted in the
        step)."""
        first = begin // BLOCK
        blocks = -(-(begin + count) // BLOCK) - first
        pieces = self._pieces[side]
        if not pieces or pieces[-1].used + blocks > pieces[-1].capacity:
            pieces.append(_Piece(max(_BLOCKS, blocks)))
            self.size += pieces[-1].masks.nbytes
            if blocks > len(self._blocks):
                self.size += 16 * (blocks - len(self._blocks))
                self._blocks = np.empty((blocks, 2), dtype=np.uint64)
        piece = pieces[-1]
        offset = piece.used * BLOCK + begin % BLOCK
        piece.used += blocks
        piece.noted.append((number << 32, first, blocks))
        return piece.masks[offset : offset + count]

    def draw(self, keys: dict[str, StreamKey], step: int, begun: int) -> None:
        """Fill the memory with the masks of a step whose first operation follows number ``begun``."""
        word = np.uint64(step + (begun << 32))
        for side, pieces in self._pieces.items():
            for piece in pieces:
                if len(piece.runs) < len(piece.noted):
                    piece.runs = np.array(piece.noted, dtype=np.uint64)
                kernels.counter_blocks(piece.runs, word, self._blocks)
                keys[side].encrypt(self._blocks[: piece.used], piece.masks)
