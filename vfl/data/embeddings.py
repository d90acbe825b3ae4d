"""Frozen local models run once: embeddings of every client, cached on disk.

The key of a cached file is the hash of the rows, the model (its weight file included), the scaling constants
and the options; change any of them and the embeddings are computed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from accel.files import write_arrays
from accel.validate import require
from vfl.data.scaling import PublicScaling
from vfl.data.sets import VerticalData
from vfl.local.config import LocalModelConfig
from vfl.progress import progress_bar

__all__ = ["ClientEmbeddings", "apply_last_layer", "embed", "embed_own_rows", "input_scaling", "scale_rows"]

Floats = npt.NDArray[np.float32]

# Raise when the meaning of a cached file changes.
_CACHE_FORMAT = 1


@dataclass(frozen=True)
class ClientEmbeddings:
    """One client's frozen embeddings (not yet bounded) and, if kept, the pooled outputs of its blocks."""

    train: Floats
    test: Floats
    public: Floats | None = None
    train_blocks: list[Floats] = field(default_factory=list)
    test_blocks: list[Floats] = field(default_factory=list)
    source: str = ""
    from_cache: bool = False


def input_scaling(data: VerticalData, client: int) -> PublicScaling | None:
    """Scaling for a table (or for identity on images) with public constants only; None for embeddings.

    Stated range first, then the public rows. A table with neither is refused.
    """
    public = None if data.public is None else data.public[client]
    return _public_scaling(data.name, public, data.value_range, data.are_embeddings)


def _public_scaling(
    name: str, public: np.ndarray | None, value_range: tuple[float, float] | None, are_embeddings: bool
) -> PublicScaling | None:
    if value_range is not None:
        return PublicScaling.from_range(*value_range)
    if are_embeddings:
        return None
    require(
        public is not None,
        f"{name}: public rows",
        None,
        "present, or a stated value range",
        "set rows aside (public_fraction > 0) or give value_range; private rows must not be used for scaling",
    )
    assert public is not None
    return PublicScaling.from_public(public.reshape(len(public), -1).astype(np.float64))


def embed_own_rows(
    rows: np.ndarray,
    config: LocalModelConfig,
    *,
    name: str,
    public: np.ndarray | None = None,
    value_range: tuple[float, float] | None = None,
    are_embeddings: bool = False,
) -> tuple[Floats, str]:
    """What one client, which has nobody else's columns, gets of its own rows: outputs of its frozen local model (not
    yet bounded), and what was taken as public. ``embed`` for a single client and without labels."""
    raw_images = _are_raw_images(rows, config)
    scaling = None if raw_images else _public_scaling(name, public, value_range, are_embeddings)
    outputs = _run_model({"train": rows}, config, scaling, title=f"embeddings of {name}")["train"]
    return outputs, _source(config, scaling)


def embed(
    data: VerticalData,
    config: LocalModelConfig | Sequence[LocalModelConfig],
    *,
    cache_dir: str | Path | None = None,
    keep_blocks: bool = False,
    public_rows: int = 2000,
    progress: bool = True,
) -> list[ClientEmbeddings]:
    """Run every client's frozen local model over its train, test and public rows (one config, or one each).

    Public embeddings serve to choose a row bound, for which the first ``public_rows`` are enough.
    """
    configs = [config] * data.num_clients if isinstance(config, LocalModelConfig) else list(config)
    require(len(configs) == data.num_clients, "local models", len(configs), f"{data.num_clients} configurations")
    return [
        _embed_client(
            data,
            i,
            configs[i],
            None if cache_dir is None else Path(cache_dir),
            keep_blocks,
            public_rows,
            progress,
        )
        for i in range(data.num_clients)
    ]


def apply_last_layer(
    data: VerticalData,
    weights: str | Path,
    *,
    cache_dir: str | Path | None = None,
    keep_blocks: bool = False,
) -> list[ClientEmbeddings]:
    """Precomputed penultimate features through a network's last layer (``fc``): x ↦ x·Wᵀ + b, cached like
    ``embed``.

    ``keep_blocks`` keeps the features as the one block that a LoRA layer can read.
    """
    file = Path(weights)
    require(file.exists(), "last_layer", str(weights), "an existing weight file")
    hashed = hashlib.sha256(file.read_bytes()).hexdigest()
    layer: tuple[Floats, Floats] | None = None
    out = []
    for i in range(data.num_clients):
        parts = {"train": data.train[i], "test": data.test[i]}
        if data.public is not None:
            parts["public"] = data.public[i]
        source = f"precomputed features through the last layer of {file.name}"
        key = _key(parts, LocalModelConfig(), None, keep_blocks, hashed)
        path = None if cache_dir is None else Path(cache_dir) / f"embeddings-{key[:32]}.npz"
        if path is not None and path.exists():
            with np.load(path) as z:
                out.append(_collect({name: z[name] for name in z}, source, True))
            continue
        if layer is None:
            import torch

            state = torch.load(file, map_location="cpu", weights_only=True)
            require("fc.weight" in state, "last_layer", str(weights), "a file with fc.weight and fc.bias")
            layer = (state["fc.weight"].float().numpy(), state["fc.bias"].float().numpy())
        weight, bias = layer
        require(
            parts["train"].shape[1] == weight.shape[1],
            "embeddings",
            parts["train"].shape,
            f"(rows, {weight.shape[1]}) for this last layer",
        )
        arrays = {name: (rows.astype(np.float32) @ weight.T + bias) for name, rows in parts.items()}
        if keep_blocks:
            arrays |= {f"{name}_block_0": parts[name].astype(np.float32) for name in ("train", "test")}
        if path is not None:
            _keep(path, arrays)
        out.append(_collect(arrays, source, False))
    return out


def _embed_client(
    data: VerticalData,
    client: int,
    config: LocalModelConfig,
    cache: Path | None,
    keep_blocks: bool,
    public_rows: int,
    progress: bool,
) -> ClientEmbeddings:
    parts = {"train": data.train[client], "test": data.test[client]}
    if data.public is not None and public_rows:
        parts["public"] = data.public[client][:public_rows]
    scaling = None if _are_raw_images(parts["train"], config) else input_scaling(data, client)
    source = _source(config, scaling)
    key = _key(parts, config, scaling, keep_blocks)
    path = None if cache is None or config.kind == "identity" else cache / f"embeddings-{key[:32]}.npz"
    if path is not None and path.exists():
        with np.load(path) as z:
            arrays = {name: z[name] for name in z}
        return _collect(arrays, source, True)
    title = f"embeddings of client {client + 1}"
    arrays = _run_model(parts, config, scaling, keep_blocks=keep_blocks, title=title, progress=progress)
    if path is not None:
        _keep(path, arrays)
    return _collect(arrays, source, False)


def _are_raw_images(rows: np.ndarray, config: LocalModelConfig) -> bool:
    """A torch model on uint8 images uses its own public pixel constants."""
    return config.kind != "identity" and rows.dtype == np.uint8


def _source(config: LocalModelConfig, scaling: PublicScaling | None) -> str:
    return config.describe() + (f"; {scaling.source}" if scaling else "")


def _run_model(
    parts: dict[str, np.ndarray],
    config: LocalModelConfig,
    scaling: PublicScaling | None,
    *,
    keep_blocks: bool = False,
    title: str,
    progress: bool = True,
) -> dict[str, np.ndarray]:
    """Each part through the frozen model; blocks, if kept, of all but the public rows."""
    arrays: dict[str, np.ndarray] = {}
    if config.kind == "identity":
        arrays |= {name: _identity(rows, scaling) for name, rows in parts.items()}
        if keep_blocks:
            arrays |= {f"{name}_block_0": arrays[name] for name in ("train", "test")}
        return arrays
    from vfl.local.models import build_local_model, embed_rows

    model = build_local_model(config, parts["train"].shape[1:])
    with progress_bar(title, sum(len(r) for r in parts.values()), progress) as advance:
        for name, rows in parts.items():
            ready = rows if _are_raw_images(rows, config) else scale_rows(rows, scaling)
            arrays[name], blocks = embed_rows(
                model, config, ready, keep_blocks=keep_blocks and name != "public", advance=advance
            )
            arrays |= {f"{name}_block_{l}": b for l, b in enumerate(blocks)}
    return arrays


def _identity(rows: np.ndarray, scaling: PublicScaling | None) -> Floats:
    return np.ascontiguousarray(scale_rows(rows, scaling).reshape(len(rows), -1), dtype=np.float32)


def scale_rows(rows: np.ndarray, scaling: PublicScaling | None) -> np.ndarray:
    """Rows of any shape, scaled column by column with public constants, as float32."""
    if scaling is None:
        return rows.astype(np.float32)
    flat = scaling.apply(rows.reshape(len(rows), -1))
    return flat.reshape(rows.shape).astype(np.float32)


def _collect(arrays: dict[str, np.ndarray], source: str, from_cache: bool) -> ClientEmbeddings:
    def blocks(part: str) -> list[Floats]:
        count = sum(name.startswith(f"{part}_block_") for name in arrays)
        return [arrays[f"{part}_block_{l}"] for l in range(count)]

    return ClientEmbeddings(
        arrays["train"],
        arrays["test"],
        arrays.get("public"),
        blocks("train"),
        blocks("test"),
        source,
        from_cache,
    )


def _key(
    parts: dict[str, np.ndarray],
    config: LocalModelConfig,
    scaling: PublicScaling | None,
    keep_blocks: bool,
    extra: str = "",
) -> str:
    digest = hashlib.sha256(f"{_CACHE_FORMAT} {config.fingerprint()} {keep_blocks} {extra}".encode())
    for name, rows in sorted(parts.items()):
        digest.update(f"{name} {rows.shape} {rows.dtype}".encode())
        digest.update(np.ascontiguousarray(rows).data)
    if scaling is not None:
        digest.update(f"{scaling.limit}".encode() + scaling.centre.tobytes() + scaling.spread.tobytes())
    return digest.hexdigest()


def _keep(path: Path, arrays: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_arrays(path, arrays, private=True)  # what the cache holds is as private as the rows
