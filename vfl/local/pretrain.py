"""Pre-train a local model on a *public* set: ``python -m vfl.local.pretrain``.

Public means: CIFAR-100 for CIFAR-10, the public rows of an embedded set, or a file of public images. Never
the private rows: a model fitted on them would tie every embedding to every record and void the claim.
The file it writes is a checkpoint after every epoch, and when ``--minutes`` are over; ``--resume`` continues from it,
and ``--local-weights`` of the other commands reads it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from accel.files import whole_file
from accel.validate import require, require_integer, require_real
from vfl.data.public_images import PUBLIC_CIFAR100, read_public_cifar100
from vfl.data.scaling import PublicScaling
from vfl.data.sets import load_data, split_columns
from vfl.local.config import LocalModelConfig
from vfl.local.models import build_local_model, to_tensor
from vfl.progress import progress_bar

__all__ = ["load_public_images", "main", "moved_batch", "moved_rows", "pretrain"]


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
        found = read_public_cifar100(str(data_root))
        require(found is not None, "data_root", data_root, f"a folder with one of {', '.join(PUBLIC_CIFAR100)}")
        assert found is not None
        return found
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
    shift: int = 0,
    every_row: bool = False,
    hold: int = 0,
    minutes: float | None = None,
    resume: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """Train on column strips of public images (one strip, or all as one set) and write ``out`` after each epoch, and in
    the middle of one when ``minutes`` are over; with ``resume`` training goes on from there, to the bit as if it had
    not stopped.

    A tenth of the images (not of the strips) is kept for validation. Random horizontal flips, shifts by up to ``shift``
    pixels (margins are zero), both drawn once a batch, or for every row of it (``every_row``); SGD with momentum 0.9,
    at its full rate for ``hold`` epochs, then along a cosine.
    """
    require_integer("epochs", epochs, 1)
    require_integer("batch_size", batch_size, 1)
    require_real("learning_rate", learning_rate, 0.0, open_low=True)
    require_integer("shift", shift, 0)
    require_integer("hold", hold, 0, epochs - 1)
    train, held_out = _deal(images, labels, num_clients, strip, seed)
    run = _Run(config, train, held_out, epochs, batch_size, learning_rate, shift, every_row, hold, seed)
    if resume and out.exists():
        run.load(out)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    left = max(0, (epochs - run.epoch) * run.num_batches - run.batch)
    with progress_bar(f"pre-training {config.kind}", left, progress) as advance:
        while run.epoch < epochs:
            finished = run.train_epoch(end, advance)
            _save(out, run)
            if not finished:
                break
    return {"history": run.history, "file": str(out), "finished": run.epoch == epochs}


Rows = tuple[np.ndarray, npt.NDArray[np.int64]]


def _deal(images: np.ndarray, labels: np.ndarray, num_clients: int, strip: int | None, seed: int) -> tuple[Rows, Rows]:
    """Strips and labels to train on and to validate on; all strips of an image are on the same side."""
    strips = split_columns(images, num_clients)
    if strip is not None:
        require_integer("strip", strip, 0, num_clients - 1)
    widths = {s.shape for s in strips}
    require(strip is not None or len(widths) == 1, "strip", strip, "given when the strips differ in width")
    chosen = strips if strip is None else (strips[strip],)
    held_out, kept = np.split(np.random.default_rng(seed).permutation(len(labels)), [len(labels) // 10])

    def rows(which: npt.NDArray[np.int64]) -> Rows:
        return np.concatenate([s[which] for s in chosen]), np.tile(labels[which].astype(np.int64), len(chosen))

    return rows(kept), rows(held_out)


class _Run:
    """Model, head and everything that moves while they train; ``batch`` is the next batch of the epoch under way."""

    def __init__(
        self,
        config: LocalModelConfig,
        train: Rows,
        held_out: Rows,
        epochs: int,
        batch_size: int,
        learning_rate: float,
        shift: int,
        every_row: bool,
        hold: int,
        seed: int,
    ) -> None:
        self.config, self.epochs, self.batch_size, self.learning_rate = config, epochs, batch_size, learning_rate
        self.shift, self.every_row, self.hold = shift, every_row, hold
        self.rows, self.labels = train[0], torch.from_numpy(train[1])
        self.held_out = held_out
        self.model = build_local_model(config, self.rows.shape[1:])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = nn.Linear(self.model.output_width, int(max(train[1].max(), held_out[1].max(initial=0))) + 1)
        self.optimiser = torch.optim.SGD(
            [*self.model.parameters(), *self.head.parameters()], lr=learning_rate, momentum=0.9, weight_decay=5e-4
        )
        self.generator = torch.Generator().manual_seed(seed)
        self.epoch, self.batch, self.loss_sum = 0, 0, 0.0
        self.order = torch.zeros(0, dtype=torch.int64)
        self.history: list[dict[str, Any]] = []

    @property
    def num_batches(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def options(self) -> str:
        """What a checkpoint belongs to."""
        chosen: dict[str, Any] = {
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "learning_rate": self.learning_rate,
            "shift": self.shift,
        }
        chosen |= {"every_row": True} if self.every_row else {}
        chosen |= {"hold": self.hold} if self.hold else {}
        return json.dumps({**dataclasses.asdict(self.config), **chosen, "rows": len(self.labels)})

    def train_epoch(self, end: float | None, advance: Callable[[int], object]) -> bool:
        """The rest of the epoch; False if time was over before its end."""
        gone = max(0, self.epoch - self.hold) / (self.epochs - self.hold)
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate * 0.5 * (1 + math.cos(math.pi * gone))
        if self.batch == 0:
            self.order, self.loss_sum = torch.randperm(len(self.labels), generator=self.generator), 0.0
        with self.model.pretraining():
            while self.batch < self.num_batches:
                if end is not None and time.monotonic() >= end:
                    return False
                self._step(self.order[self.batch * self.batch_size : (self.batch + 1) * self.batch_size])
                self.batch += 1
                advance(1)
        accuracy = _validate(self.model, self.head, self.config, *self.held_out)
        self.epoch, self.batch = self.epoch + 1, 0
        loss = self.loss_sum / len(self.labels)
        self.history.append({"epoch": self.epoch, "loss": loss, "validation_accuracy": accuracy})
        return True

    def _step(self, rows: torch.Tensor) -> None:
        if len(rows) < 2:  # batch norm needs two rows
            return
        x = to_tensor(self.rows[rows.numpy()], self.config)
        if x.ndim == 4:
            x = (
                moved_rows(x, self.shift, self.generator)
                if self.every_row
                else moved_batch(x, self.shift, self.generator)
            )
        loss = nn.functional.cross_entropy(self.head(self.model(x)), self.labels[rows])
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.loss_sum += float(loss.detach()) * len(rows)

    def load(self, file: Path) -> None:
        """Go on from a checkpoint, which must be of the same model, schedule and number of rows."""
        state = torch.load(file, map_location="cpu", weights_only=True)
        require(
            state.get("options") == self.options(),
            "resume",
            str(file),
            "a checkpoint of this model, with these epochs, batches, rate and rows",
            "use another --out, or the options it was started with",
        )
        self.model.load_state_dict(state["model"])
        self.head.load_state_dict(state["head"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.generator.set_state(state["generator"])
        self.epoch, self.batch, self.loss_sum = state["epoch"], state["batch"], state["loss_sum"]
        self.order, self.history = state["order"], json.loads(state["history"])


def moved_batch(x: torch.Tensor, shift: int, generator: torch.Generator) -> torch.Tensor:
    """The batch, flipped or not and shifted, all rows alike."""
    if torch.rand(1, generator=generator) < 0.5:
        x = x.flip(3)
    if not shift:
        return x
    top, left = torch.randint(0, 2 * shift + 1, (2,), generator=generator).tolist()
    height, width = x.shape[2:]
    return nn.functional.pad(x, [shift] * 4)[:, :, top : top + height, left : left + width]


def moved_rows(x: torch.Tensor, shift: int, generator: torch.Generator) -> torch.Tensor:
    """The batch, each row flipped or not and shifted on its own."""
    rows, _, height, width = x.shape
    flips = torch.rand(rows, generator=generator) < 0.5
    top, left = torch.randint(0, 2 * shift + 1, (2, rows, 1), generator=generator)
    across = torch.arange(width)
    across = torch.where(flips[:, None], across.flip(0), across) + left
    down = torch.arange(height) + top
    padded = nn.functional.pad(x, [shift] * 4)
    return padded[torch.arange(rows)[:, None, None], :, down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)


def _validate(
    model: nn.Module, head: nn.Module, config: LocalModelConfig, rows: np.ndarray, labels: npt.NDArray[np.int64]
) -> float:
    right = 0
    with torch.no_grad():
        for start in range(0, len(rows), 500):
            guess = head(model(to_tensor(rows[start : start + 500], config))).argmax(1).numpy()
            right += int((guess == labels[start : start + 500]).sum())
    return right / max(1, len(rows))


def _save(out: Path, run: _Run) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "model": run.model.state_dict(),
        "head": run.head.state_dict(),
        "optimiser": run.optimiser.state_dict(),
        "generator": run.generator.get_state(),
        "options": run.options(),
        "epoch": run.epoch,
        "batch": run.batch,
        "loss_sum": run.loss_sum,
        "order": run.order,
        "history": json.dumps(run.history),
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
    parser.add_argument("--local-model", default="cnn", choices=("mlp", "cnn", "small_resnet", "resnet18"))
    parser.add_argument("--local-weights", help="start from this file")
    parser.add_argument("--output-width", type=int)
    parser.add_argument("--stem", default="cifar", choices=("imagenet", "cifar"))
    parser.add_argument("--upscale", type=int, default=1)
    parser.add_argument("--clients", type=int, default=2, help="number of column strips")
    parser.add_argument("--strip", type=int, help="train on this strip only (default: all strips)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--hold", type=int, default=0, help="epochs at the full rate, before it falls along a cosine")
    parser.add_argument("--shift", type=int, default=0, help="random shifts by up to this many pixels")
    parser.add_argument(
        "--every-row", action="store_true", help="draw flips and shifts for every row, not once a batch"
    )
    parser.add_argument("--max-rows", type=int, help="use the first rows only")
    parser.add_argument("--threads", type=int, help="torch threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain/weights.pth"))
    parser.add_argument("--minutes", type=float, help="stop after this long, with a checkpoint; go on with --resume")
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
        shift=options.shift,
        every_row=options.every_row,
        hold=options.hold,
        minutes=options.minutes,
        resume=options.resume,
        seed=options.seed,
        progress=not options.json,
    )
    if options.json:
        print(json.dumps(result))
        return 0
    if not result["history"]:
        Console().print("Stopped within the first epoch: go on with --resume")
        return 0
    last = result["history"][-1]
    Console().print(
        f"{config.kind} after {last['epoch']} of {options.epochs} epochs: loss {last['loss']:.3f}, validation accuracy "
        f"{last['validation_accuracy']:.2%} on public rows, {time.perf_counter() - started:.1f} s; "
        f"use it with --local-weights {options.out}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
