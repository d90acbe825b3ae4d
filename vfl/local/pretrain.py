"""Pre-train a local model on a *public* set: ``python -m vfl.local.pretrain``.

Public means: CIFAR-100 for CIFAR-10, the public rows of an embedded set, or a file of public images. Never
the private rows: a model fitted on them would tie every embedding to every record and void the claim.
The file it writes is a checkpoint after every epoch; ``--resume`` continues from it, and ``--local-weights``
of the other commands reads it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from accel.files import whole_file
from accel.validate import require, require_integer, require_real
from vfl.data.scaling import PublicScaling
from vfl.data.sets import load_data, split_columns
from vfl.local.config import LocalModelConfig
from vfl.local.models import build_local_model, to_tensor
from vfl.progress import progress_bar

__all__ = ["load_public_images", "main", "pretrain"]


def load_public_images(
    source: str, *, data_root: str | None = None, public_fraction: float = 0.3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(images, labels) of a public set: ``cifar100``, an embedded set's public rows, or an .npz with x and y.

    The embedded sets give the public rows of ``load_data(source, public_fraction=…, seed=…)``: use the same
    fraction and seed when training, so that they stay disjoint from the private rows.
    """
    if source.endswith(".npz"):
        require(Path(source).exists(), "data", source, "an existing .npz file with x and y")
        with np.load(source) as z:
            return z["x"], z["y"].astype(np.int64)
    if source == "cifar100":
        require(data_root is not None, "data_root", None, "a folder", "pass --data-root DIR")
        file = Path(str(data_root)) / "cifar100_public.npz"
        if file.exists():
            with np.load(file) as z:
                return z["x"], z["y"].astype(np.int64)
        from vfl.data.vision import read_torchvision

        return read_torchvision("cifar100", Path(str(data_root)))[0]
    data = load_data(source, num_clients=1, data_root=data_root, public_fraction=public_fraction, seed=seed)
    require(data.public is not None, "public_fraction", public_fraction, "above 0, so that there are public rows")
    assert data.public is not None and data.public_labels is not None
    rows: np.ndarray = data.public[0]
    if data.value_range is not None and rows.dtype != np.uint8:
        rows = PublicScaling.from_range(*data.value_range).apply(rows)
    return rows, data.public_labels


def pretrain(
    images: np.ndarray,
    labels: np.ndarray,
    config: LocalModelConfig,
    out: Path,
    *,
    num_clients: int = 2,
    strip: int | None = None,
    epochs: int = 10,
    batch_size: int = 128,
    learning_rate: float = 0.1,
    resume: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """Train on column strips of public images (one strip, or all as one set) and write ``out`` after each
    epoch.

    A tenth of the rows is kept for validation. Random horizontal flips, SGD with momentum 0.9, cosine
    schedule.
    """
    require_integer("epochs", epochs, 1)
    require_integer("batch_size", batch_size, 1)
    require_real("learning_rate", learning_rate, 0.0, open_low=True)
    strips = split_columns(images, num_clients)
    if strip is not None:
        require_integer("strip", strip, 0, num_clients - 1)
    widths = {s.shape for s in strips}
    require(strip is not None or len(widths) == 1, "strip", strip, "given when the strips differ in width")
    order = np.random.default_rng(seed).permutation(len(labels))
    held_out = order[: len(order) // 10]
    kept = order[len(order) // 10 :]
    chosen = strips if strip is None else (strips[strip],)
    train_x = np.concatenate([s[kept] for s in chosen])
    train_y = torch.from_numpy(np.concatenate([labels[kept]] * len(chosen)).astype(np.int64))
    classes = int(labels.max()) + 1
    model = build_local_model(config, train_x.shape[1:])
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = nn.Linear(model.output_width, classes)
    optimiser = torch.optim.SGD(
        [*model.parameters(), *head.parameters()], lr=learning_rate, momentum=0.9, weight_decay=5e-4
    )
    start, history = 0, []
    if resume and out.exists():
        state = torch.load(out, map_location="cpu", weights_only=True)
        require(
            json.loads(state["config"]) == dataclasses.asdict(config),
            "resume",
            str(out),
            "a checkpoint of this model",
            "use another --out, or the options it was started with",
        )
        model.load_state_dict(state["model"])
        head.load_state_dict(state["head"])
        optimiser.load_state_dict(state["optimiser"])
        generator.set_state(state["generator"])
        start, history = int(state["epoch"]), json.loads(state["history"])
    batches = -(-len(train_y) // batch_size)
    with progress_bar(f"pre-training {config.kind}", max(0, epochs - start) * batches, progress) as advance:
        for epoch in range(start, epochs):
            for group in optimiser.param_groups:
                group["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
            loss_sum = 0.0
            with model.pretraining():
                for rows in torch.randperm(len(train_y), generator=generator).split(batch_size):
                    if len(rows) < 2:  # batch norm needs two rows
                        continue
                    x = to_tensor(train_x[rows.numpy()], config)
                    if x.ndim == 4 and torch.rand(1, generator=generator) < 0.5:
                        x = x.flip(3)
                    loss = nn.functional.cross_entropy(head(model(x)), train_y[rows])
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
                    loss_sum += float(loss.detach()) * len(rows)
                    advance(1)
            accuracy = _validate(model, head, config, [s[held_out] for s in chosen], labels[held_out])
            history.append({"epoch": epoch + 1, "loss": loss_sum / len(train_y), "validation_accuracy": accuracy})
            _save(out, model, head, optimiser, generator, config, epoch + 1, history)
    return {"history": history, "file": str(out)}


def _validate(
    model: nn.Module, head: nn.Module, config: LocalModelConfig, strips: list[np.ndarray], labels: np.ndarray
) -> float:
    right = count = 0
    with torch.no_grad():
        for rows in strips:
            for start in range(0, len(rows), 500):
                guess = head(model(to_tensor(rows[start : start + 500], config))).argmax(1).numpy()
                right += int((guess == labels[start : start + 500]).sum())
                count += len(guess)
    return right / max(1, count)


def _save(
    out: Path,
    model: nn.Module,
    head: nn.Module,
    optimiser: torch.optim.Optimizer,
    generator: torch.Generator,
    config: LocalModelConfig,
    epoch: int,
    history: list[dict[str, Any]],
) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "head": head.state_dict(),
        "optimiser": optimiser.state_dict(),
        "generator": generator.get_state(),
        "config": json.dumps(dataclasses.asdict(config)),
        "epoch": epoch,
        "history": json.dumps(history),
    }
    with whole_file(out) as handle:
        torch.save(state, handle)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the pre-training."""
    from rich.console import Console

    parser = argparse.ArgumentParser(prog="python -m vfl.local.pretrain", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", default="digits", help="cifar100, digits, ocr_letters, or an .npz with x and y (public!)"
    )
    parser.add_argument("--data-root", help="folder of the data sets")
    parser.add_argument(
        "--public-fraction", type=float, default=0.3, help="of an embedded set; use the same in training"
    )
    parser.add_argument("--local-model", default="cnn", choices=("mlp", "cnn", "resnet18"))
    parser.add_argument("--local-weights", help="start from this file")
    parser.add_argument("--output-width", type=int)
    parser.add_argument("--stem", default="cifar", choices=("imagenet", "cifar"))
    parser.add_argument("--upscale", type=int, default=1)
    parser.add_argument("--clients", type=int, default=2, help="number of column strips")
    parser.add_argument("--strip", type=int, help="train on this strip only (default: all strips)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--max-rows", type=int, help="use the first rows only")
    parser.add_argument("--threads", type=int, help="torch threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain/weights.pth"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    config = LocalModelConfig(
        options.local_model,
        output_width=options.output_width,
        weights=options.local_weights,
        stem=options.stem if options.local_model == "resnet18" else "imagenet",
        upscale=options.upscale,
        seed=options.seed,
    )
    images, labels = load_public_images(
        options.data, data_root=options.data_root, public_fraction=options.public_fraction, seed=options.seed
    )
    if options.max_rows:
        images, labels = images[: options.max_rows], labels[: options.max_rows]
    started = time.perf_counter()
    result = pretrain(
        images,
        labels,
        config,
        options.out,
        num_clients=options.clients,
        strip=options.strip,
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        resume=options.resume,
        seed=options.seed,
        progress=not options.json,
    )
    if options.json:
        print(json.dumps(result))
        return 0
    last = result["history"][-1]
    Console().print(
        f"{config.kind} after {last['epoch']} epochs: loss {last['loss']:.3f}, validation accuracy "
        f"{last['validation_accuracy']:.2%} on public rows, {time.perf_counter() - started:.1f} s; "
        f"use it with --local-weights {options.out}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
