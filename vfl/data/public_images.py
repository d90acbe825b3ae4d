"""CIFAR-100 as public data, in whichever form it lies under a data root: the one reader of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["PUBLIC_CIFAR100", "read_public_cifar100"]

# An .npz with x and y; sheets of 50×50 lossless tiles with labels.u8; the files its authors publish. The first one
# found is read.
PUBLIC_CIFAR100 = ("cifar100_public.npz", "cifar100_public", "cifar-100-python")
_TILES, _SIDE = 50, 32


def read_public_cifar100(root: str | Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]] | None:
    """Images (rows, 32, 32, 3) and fine labels; None where there are none."""
    packed, sheets, published = (Path(root) / name for name in PUBLIC_CIFAR100)
    if packed.exists():
        with np.load(packed) as z:
            return z["x"], z["y"].astype(np.int64)
    if sheets.exists():
        labels = np.fromfile(sheets / "labels.u8", dtype=np.uint8).astype(np.int64)
        return np.concatenate([_tiles(file) for file in sorted(sheets.glob("*.webp"))])[: len(labels)], labels
    if published.exists():
        from vfl.data.vision import read_torchvision

        return read_torchvision("cifar100", Path(root), False)[0]
    return None


def _tiles(file: Path) -> npt.NDArray[np.uint8]:
    from PIL import Image

    with Image.open(file) as sheet:
        pixels = np.asarray(sheet)
    rows = pixels.reshape(-1, _SIDE, _TILES, _SIDE, 3).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(rows.reshape(-1, _SIDE, _SIDE, 3))
