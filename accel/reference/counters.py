"""Counter blocks for many streams at once: what AES encrypts to the masks of a recorded step."""

from __future__ import annotations

import numpy as np

__all__ = ["counter_blocks"]


def counter_blocks(runs: np.ndarray, word: np.uint64, out: np.ndarray) -> None:
    """Blocks (nonce, number), one stretch behind the other: of each run (nonce, first number, how many) the nonce plus
    ``word`` and the numbers from the first on, most significant byte first. ``out`` has two columns."""
    start = 0
    for nonce, first, count in runs.tolist():
        out[start : start + count, 0] = np.uint64((nonce + int(word)) % 2**64)
        out[start : start + count, 1] = np.arange(first, first + count, dtype=">u8").view(np.uint64)
        start += count
