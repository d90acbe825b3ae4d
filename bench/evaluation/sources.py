"""Where a cell's embeddings come from: real data under ``--data-root``, public data beside it, weights of the networks.

A data set that is not there is no error: its cells say so (``NotThere``) and the others run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from accel.errors import InvalidArgument, PpvflError
from vfl.data.embeddings import ClientEmbeddings, apply_last_layer, embed
from vfl.data.public_images import PUBLIC_CIFAR100, read_public_cifar100
from vfl.data.scaling import PublicProjection
from vfl.data.sets import VerticalData, load_data, load_embeddings, split_columns
from vfl.local.config import LocalModelConfig

__all__ = [
    "ABSENT",
    "DATA_TITLES",
    "NUM_CLASSES",
    "PRETRAININGS",
    "DataOptions",
    "NotThere",
    "load_parts",
    "public_task",
    "superclasses",
]

DATA_TITLES = {
    "cifar10": "CIFAR-10",
    "cifar10_images": "CIFAR-10 from its images, LoRA on all eight blocks",
    "emnist": "EMNIST",
    "ocr_letters": "OCR letters (26 classes, a stand-in; not EMNIST)",
    "digits": "digits (embedded)",
}
NUM_CLASSES = {"cifar10": 10, "cifar10_images": 10, "emnist": 26, "ocr_letters": 26, "digits": 10}
# Which local models a data set is tried with; "none" is the identity on the client's own columns, "own" a small
# residual network that vfl.local.pretrain trained on the public images.
PRETRAININGS = {
    "cifar10": ("imagenet", "cifar100", "own"),
    "cifar10_images": ("imagenet",),
    "emnist": ("imagenet", "cifar100"),
    "ocr_letters": ("none",),
    "digits": ("none",),
}
ABSENT = "absent"  # in the place of a file's digest
_UPSCALE = 4  # a strip of 32×16 pixels is small for a network made for 224×224

# CIFAR-100's 100 fine classes, each as the digit (base 20) of its superclass, both in their published numbering.
_DIGITS = "41e80677i33e9i7b397b6b5a76df3f0b1aceg9b55j88fdehiag4h420h4iha32ccgc19j2a01gc9dfdgj246j558ji12f60h8ed"
_SUPERCLASS = np.array([int(digit, 20) for digit in _DIGITS])


def superclasses(fine: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """CIFAR-100's 20 superclasses of fine labels."""
    found: npt.NDArray[np.int64] = _SUPERCLASS[fine]
    return found


class NotThere(PpvflError):
    """A data set, weights or public rows that are not on this machine; the message says what to bring."""


@dataclass(frozen=True)
class DataOptions:
    """Where things lie. ``cifar10`` takes precomputed features where they are there, which have one block for LoRA;
    ``cifar10_images`` always runs the networks over the images (twenty minutes of a core, once), for all eight.
    """

    root: str | None = None
    imagenet_weights: str | None = None
    cifar100_weights: str | None = None
    own_weights: str | None = None
    cache: str = ".cache/embeddings"

    def file(self, *names: str) -> Path | None:
        """The first of these that exists under the data root."""
        found = [Path(self.root) / name for name in names if (Path(self.root) / name).exists()] if self.root else []
        return found[0] if found else None

    def identity(self, data: str, pretraining: str) -> list[str]:
        """Digests of all files that a result on this data depends on; kept results belong to them."""
        own = {
            "cifar10": ["cifar10_strips_x4.npz", "cifar-10-batches-py"],
            "cifar10_images": ["cifar-10-batches-py"],
            "emnist": ["EMNIST"],
            "ocr_letters": ["ocr_letters.npz"],
        }
        found = [self.file(*own[data])] if data in own else []
        if pretraining != "none":
            found.append(self.file(*PUBLIC_CIFAR100))
            try:
                found.append(Path(self.weights(pretraining)))
            except NotThere:
                found.append(None)
        return [ABSENT if path is None else _digest(path) for path in found]

    def weights(self, pretraining: str) -> str:
        """The weight file of a pre-training; given, or found under the data root."""
        given = {
            "imagenet": self.imagenet_weights, "cifar100": self.cifar100_weights, "own": self.own_weights,
        }[pretraining]  # fmt: skip
        found = self.file("resnet18_imagenet.pth", "resnet18_imagenet_fp16.pth") if pretraining == "imagenet" else None
        if given or found:
            return str(given or found)
        raise NotThere(f"no weights for Pre-{pretraining}: pass --weights-{pretraining} FILE")


@lru_cache
def _digest(path: Path) -> str:
    """SHA-256 of a file; of a folder, of the names and sizes in it."""
    if path.is_dir():
        listing = sorted(f"{f.name} {f.stat().st_size}" for f in path.iterdir() if f.is_file())
        return hashlib.sha256("\n".join(listing).encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _projected(part: ClientEmbeddings, labels: npt.NDArray[np.int64] | None, width: int) -> ClientEmbeddings:
    if part.public is None or labels is None:
        raise NotThere("no labelled public rows to fit the projection on: CIFAR-100 under --data-root")
    width = min(width, part.train.shape[1])
    projection = PublicProjection.from_public(part.public, labels[: len(part.public)], width=width)
    return replace(
        part,
        train=projection.apply(part.train),
        test=projection.apply(part.test),
        public=projection.apply(part.public),
        source=f"{part.source}; {projection.source}",
    )


def _public_images(options: DataOptions) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    found = None if options.root is None else read_public_cifar100(options.root)
    if found is None:
        raise NotThere(f"no public data: CIFAR-100 must lie under --data-root as one of {', '.join(PUBLIC_CIFAR100)}")
    return found


@lru_cache(maxsize=1)
def _public_features(options: DataOptions, pretraining: str) -> tuple[list[ClientEmbeddings], npt.NDArray[np.int64]]:
    """Features of the public images, first four fifths as "train" and the rest as "test", and all their labels."""
    images, labels = _public_images(options)
    cut = len(labels) * 4 // 5
    strips = split_columns(images, 2)
    data = VerticalData(
        "cifar100_public", 100, tuple(s[:cut] for s in strips), labels[:cut], tuple(s[cut:] for s in strips),
        labels[cut:], value_range=(0.0, 255.0),
    )  # fmt: skip
    return embed(data, _network(options, pretraining), cache_dir=options.cache), labels


def _network(options: DataOptions, pretraining: str) -> LocalModelConfig:
    if pretraining == "imagenet":
        return LocalModelConfig("resnet18", output_width=512, weights=options.weights(pretraining), upscale=_UPSCALE)
    if pretraining == "own":
        return LocalModelConfig("small_resnet", output_width=512, weights=options.weights(pretraining))
    return LocalModelConfig("resnet18", output_width=512, weights=options.weights(pretraining), stem="cifar")


@lru_cache(maxsize=2)
def load_parts(
    data: str, pretraining: str, features: str, projection: int, options: DataOptions
) -> tuple[VerticalData, Sequence[ClientEmbeddings]]:
    """The data set and every client's embeddings, with the blocks LoRA reads.

    ``features``: "logits" (the network's 1000 outputs) or "penultimate" (512). ``projection``: directions kept by
    the public projection, 0 for none.
    """
    if pretraining == "none":
        if data != "digits" and options.file(f"{data}.npz") is None:
            raise NotThere(f"{data}.npz is not under --data-root")
        loaded = load_data(data, data_root=options.root, public_fraction=0.1)
        parts = embed(loaded, LocalModelConfig(), keep_blocks=True, public_rows=len(loaded.train_labels))
    else:
        loaded, parts = _network_features(data, pretraining, options)
        if projection:
            public, labels = _public_features(options, pretraining)
            parts = [replace(p, public=np.concatenate([q.train, q.test])) for p, q in zip(parts, public, strict=True)]
            loaded = replace(loaded, public_labels=labels)
        if features == "logits" and pretraining == "imagenet":
            ready = replace(loaded, train=tuple(p.train for p in parts), test=tuple(p.test for p in parts), public=None)
            logits = apply_last_layer(ready, options.weights(pretraining), cache_dir=options.cache, keep_blocks=False)
            parts = [
                replace(
                    logit, train_blocks=part.train_blocks or [part.train], test_blocks=part.test_blocks or [part.test]
                )
                for part, logit in zip(parts, logits, strict=True)
            ]
    if projection:
        parts = [_projected(p, loaded.public_labels, projection) for p in parts]
    return loaded, parts


def _network_features(data: str, pretraining: str, options: DataOptions) -> tuple[VerticalData, list[ClientEmbeddings]]:
    packed = options.file("cifar10_strips_x4.npz")
    if data == "cifar10" and pretraining == "imagenet" and packed is not None:
        loaded = load_embeddings(packed)
        return loaded, embed(loaded, LocalModelConfig(), keep_blocks=True)
    network = _network(options, pretraining)
    if options.root is None:
        raise NotThere(f"{DATA_TITLES[data]}: pass --data-root DIR")
    try:
        loaded = load_data(data.removesuffix("_images"), data_root=options.root)
        loaded = replace(loaded, public=None, public_labels=None)
    except InvalidArgument as error:
        raise NotThere(str(error)) from error
    return loaded, embed(loaded, network, cache_dir=options.cache, keep_blocks=True)


@lru_cache(maxsize=8)
def public_task(options: DataOptions, width: int) -> tuple[VerticalData, list[ClientEmbeddings]]:
    """The stand-in on which our preset was chosen: ten superclasses of CIFAR-100, features projected with constants
    fitted on the other ten (``width`` directions, 0 for none). No private row takes part.
    """
    features, labels = _public_features(options, "imagenet")
    kind = superclasses(labels)
    task, other = kind >= 10, kind < 10
    rows = [np.concatenate([p.train, p.test]) for p in features]
    cut = int(0.8 * task.sum())
    parts = []
    for block in rows:
        mine = block[task]
        part = ClientEmbeddings(mine[:cut], mine[cut:], block[other], [mine[:cut]], [mine[cut:]], "CIFAR-100, public")
        parts.append(_projected(part, labels[other], width) if width else part)
    y = kind[task] - 10
    data = VerticalData(
        "cifar100_superclasses", 10, tuple(p.train for p in parts), y[:cut], tuple(p.test for p in parts), y[cut:],
        are_embeddings=True,
    )  # fmt: skip
    return data, parts
