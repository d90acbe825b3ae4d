"""The one place where torchvision is imported.

A torchvision wheel built for CUDA does not import beside a CPU build of torch: two of its operators are
missing. Nothing here uses them, so they are declared (never implemented) when, and only when, the plain
import fails for that reason.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from accel.errors import InvalidArgument
from accel.validate import require_choice

__all__ = ["import_torchvision", "read_torchvision", "resnet18"]

Images = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]

# Kept alive: a torch.library fragment is withdrawn when its handle is collected.
_LIBRARY: list[torch.library.Library] = []


def import_torchvision() -> ModuleType:
    """torchvision, also when its compiled operators do not fit the installed torch."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error) and "torchvision::qnms" not in str(error):
            raise
    for name in [m for m in sys.modules if m == "torchvision" or m.startswith("torchvision.")]:
        del sys.modules[name]
    if not _LIBRARY:
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARY.append(library)
    return importlib.import_module("torchvision")


def resnet18(pretrained: bool, num_outputs: int = 1000) -> torch.nn.Module:
    """torchvision's ResNet-18; ``pretrained`` downloads its ImageNet weights (needs the network once)."""
    models = import_torchvision().models
    weights = models.ResNet18_Weights.IMAGENET1K_V1 if pretrained else None
    if pretrained:
        return models.resnet18(weights=weights)
    return models.resnet18(weights=None, num_classes=num_outputs)


def read_torchvision(name: str, root: Path, download: bool = False) -> tuple[Images, Images]:
    """(train, test) of cifar10, cifar100 or emnist as uint8 images (rows, height, width, channels) and
    labels.

    EMNIST letters: classes 1..26 become 0..25 and the images are transposed to stand upright.
    """
    require_choice("data", name, ("cifar10", "cifar100", "emnist"))
    datasets = import_torchvision().datasets
    parts: list[Images] = []
    for train in (True, False):
        try:
            if name == "emnist":
                part = datasets.EMNIST(str(root), split="letters", train=train, download=download)
                images = part.data.numpy().transpose(0, 2, 1)[..., None]
                labels = part.targets.numpy().astype(np.int64) - 1
            else:
                kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
                part = kind(str(root), train=train, download=download)
                images, labels = part.data, np.asarray(part.targets, dtype=np.int64)
        except RuntimeError as error:
            raise InvalidArgument(
                f"data_root = {str(root)!r}: {name} cannot be read there; its files must be complete and as their "
                f"authors publish "
                "them (torchvision compares their MD5 sums)"
            ) from error
        parts.append((np.ascontiguousarray(images, dtype=np.uint8), labels))
    return parts[0], parts[1]
