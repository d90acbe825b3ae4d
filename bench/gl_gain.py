"""Where training the clients' layers pays: ``python -m bench.gl_gain --data-root DIR``.

GL-BMF against G-BMF at the same ε, δ, data, local models and epochs, on public data, with the plaintext twins. Each
method gets the learning rates that are best for it at each ε with seed 0 (``RATES``); the comparison is of the seeds
after that, which share data split, local model and noise in pairs. A gain counts if it exceeds two standard errors.
Beside it stands G-BMF on the clients' own columns, without any local model: what a client could do instead.

    python -m bench.gl_gain --data-root DIR --only letters-8          one case; results are kept, so that it continues
    python -m bench.gl_gain --data-root DIR --update estimated        the paper's local update
    python -m bench.gl_gain --data-root DIR --layers last --layers first    LoRA on these blocks, and the difference
    between them
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
from rich.table import Table

from accel.errors import PpvflError
from accel.files import write_text
from bench.evaluation.report import printing_console
from vfl.data.embeddings import ClientEmbeddings, embed
from vfl.data.public_images import read_public_cifar100
from vfl.data.sets import VerticalData, load_data, split_columns
from vfl.federation import Federation, build_federation
from vfl.local.client import LocalUpdate
from vfl.local.config import LocalModelConfig
from vfl.local.lora import ALL_LAYERS
from vfl.training import TrainingConfig
from vfl.twins.sweep import train_adapters_at_every_epsilon, train_at_every_epsilon

__all__ = ["CASES", "Case", "Gain", "gain", "main"]

TRAINING = TrainingConfig(
    epochs=20, batch_size=1000, clip_norm=0.5, factorisation="toeplitz", schedule="linear", dtype="float32"
)
RATES = (32.0, 128.0, 512.0, 2048.0)  # of the global layer
LOCAL_RATES = (5.0, 50.0, 500.0)
LORA_ALPHA = 8.0
EPSILONS = (1.0, 8.0)
_OTHER_LETTERS = 13  # the first half of the alphabet is what the local model of ``letters-other`` knows


@dataclass(frozen=True)
class Options:
    """Where data lies, and the weights of the small residual network (``vfl.local.pretrain``)."""

    root: str | None
    weights: str | None = None


@dataclass(frozen=True)
class Case:
    """A task and its local model; ``load`` gives data and local model for a seed."""

    title: str
    load: Callable[[Options, int], tuple[VerticalData, LocalModelConfig]]


def _letters(options: Options, seed: int) -> VerticalData:
    return load_data("ocr_letters", data_root=options.root, public_fraction=0.1, seed=seed)


def _untrained(width: int) -> Callable[[Options, int], tuple[VerticalData, LocalModelConfig]]:
    def load(options: Options, seed: int) -> tuple[VerticalData, LocalModelConfig]:
        return _letters(options, seed), LocalModelConfig("mlp", output_width=width, seed=seed)

    return load


def _other_letters(options: Options, seed: int) -> tuple[VerticalData, LocalModelConfig]:
    """Pre-trained on public rows of a to m; the task is n to z."""
    from vfl.local.pretrain import pretrain

    data, local = _letters(options, seed), LocalModelConfig("mlp", output_width=16, seed=seed)
    assert data.public is not None and data.public_labels is not None
    known = data.public_labels < _OTHER_LETTERS
    images = np.concatenate([strip[known] for strip in data.public], axis=2)
    file = Path(tempfile.gettempdir()) / f"gl-gain-{local.fingerprint()[:16]}.pth"
    pretrain(images, data.public_labels[known], local, file, epochs=20, learning_rate=0.05, progress=False)
    train, test = data.train_labels >= _OTHER_LETTERS, data.test_labels >= _OTHER_LETTERS
    return replace(
        data,
        classes=data.classes - _OTHER_LETTERS,
        train=tuple(strip[train] for strip in data.train),
        train_labels=data.train_labels[train] - _OTHER_LETTERS,
        test=tuple(strip[test] for strip in data.test),
        test_labels=data.test_labels[test] - _OTHER_LETTERS,
        public_labels=None,
    ), replace(local, weights=str(file))


def _table(options: Options, seed: int) -> tuple[VerticalData, LocalModelConfig]:
    """The made-up table of bench.tabular through an untrained MLP."""
    from bench.tabular.tables import TABLES
    from vfl.tables import apply_schema

    task = TABLES["mixed"]()
    cut = apply_schema(task.schemas["bank"], task.test["bank"])[0].features.shape[1]
    (x, y), (test, test_y) = task.features(task.train), task.features(task.test)
    parts = [tuple(np.split(rows.astype(np.float32), [cut], axis=1)) for rows in (x, test)]
    labels = [(which == task.positive).astype(np.int64) for which in (y, test_y)]
    data = VerticalData(
        "mixed", 2, parts[0], labels[0], parts[1], labels[1], are_embeddings=True, notes=("columns already scaled",)
    )
    return data, LocalModelConfig("mlp", output_width=8, seed=seed)


def _images(options: Options, seed: int) -> tuple[VerticalData, LocalModelConfig]:
    """Superclasses of the public images that the small network was not trained on, in two strips."""
    from bench.evaluation.sources import NotThere, superclasses

    found = None if options.root is None else read_public_cifar100(options.root)
    if found is None or options.weights is None:
        raise NotThere("needs CIFAR-100 under --data-root and --weights FILE of python -m vfl.local.pretrain")
    images, labels = found
    held_out = np.random.default_rng(0).permutation(len(labels))[
        : len(labels) // 10
    ]  # as vfl.local.pretrain keeps them
    order = held_out[np.random.default_rng(seed).permutation(len(held_out))]
    strips, y, cut = split_columns(images[order], 2), superclasses(labels[order]), len(order) * 4 // 5
    data = VerticalData(
        "cifar100_held_out", 20, tuple(s[:cut] for s in strips), y[:cut], tuple(s[cut:] for s in strips), y[cut:],
        value_range=(0.0, 255.0),
    )  # fmt: skip
    return data, LocalModelConfig("small_resnet", output_width=512, weights=options.weights)


CASES = {
    "letters-8": Case("OCR letters, untrained MLP, 8 outputs a client", _untrained(8)),
    "letters-60": Case("OCR letters, untrained MLP, 60 outputs a client", _untrained(60)),
    "letters-other": Case("OCR letters n to z, MLP of 16 outputs trained on a to m", _other_letters),
    "table": Case("made-up table, 20,000 rows, untrained MLP, 8 outputs a client", _table),
    "images": Case("CIFAR-100 superclasses, 2,000 images, our small ResNet, 512 features a strip", _images),
}


@lru_cache(maxsize=1)
def _parts(name: str, options: Options, seed: int, own_columns: bool) -> tuple[VerticalData, list[ClientEmbeddings]]:
    data, local = CASES[name].load(options, seed)
    return data, embed(data, LocalModelConfig() if own_columns else local, keep_blocks=True, progress=False)


def _federation(
    name: str, options: Options, seed: int, method: str, update: str, layers: str, local_rate: float
) -> Federation:
    data, parts = _parts(name, options, seed, method == "own columns")
    lora = LocalUpdate(
        update,
        learning_rate=local_rate,
        regularisation="mmse" if update == "estimated" else "noise",
        parts="U" if update == "estimated" else "UV",
    )
    return build_federation(
        data, embeddings=parts, lora=method == "gl_bmf", lora_alpha=LORA_ALPHA, lora_layers=layers,
        update=lora, seed=seed, dtype=np.float32, progress=False,
    )  # fmt: skip


Rates = tuple[float, float]  # of the global layer, of the clients


def _grid(method: str) -> list[Rates]:
    local = LOCAL_RATES if method == "gl_bmf" else (0.0,)
    return [(rate, mine) for rate in RATES for mine in local]


class Runs:
    """Accuracies at every ε by (case, method, update, layers, rates, seed), kept in a file."""

    def __init__(self, file: Path, options: Options, end: float) -> None:
        self.file, self.options, self.end = file, options, end
        weights = Path(options.weights).read_bytes() if options.weights else b""
        self.settings = hashlib.sha256(f"{TRAINING} {LORA_ALPHA}".encode() + weights).hexdigest()[:16]
        self.kept: dict[str, list[float]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def accuracies(self, case: str, method: str, update: str, layers: str, rates: Rates, seed: int) -> list[float]:
        """In per cent; ``TimeoutError`` if it is not kept and time is over."""
        chosen = [f"layers {layers}"] if method == "gl_bmf" and layers != ALL_LAYERS else []
        key = " ".join(map(str, (case, method, update, *chosen, *rates, seed, *EPSILONS, self.settings)))
        if key not in self.kept:
            if time.monotonic() >= self.end:
                raise TimeoutError
            federation = _federation(case, self.options, seed, method, update, layers, rates[1])
            batch = min(TRAINING.batch_size, federation.num_samples // 4)
            config = TRAINING.with_(learning_rate=rates[0], seed=seed, batch_size=batch)
            if method == "gl_bmf":
                found = train_adapters_at_every_epsilon(federation, config, EPSILONS)
            else:
                found = train_at_every_epsilon("g_bmf", federation, config, EPSILONS)
            self.kept[key] = [100 * run.test_accuracy for run in found]
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, json.dumps(self.kept, indent=0))
        return self.kept[key]

    def best(self, case: str, method: str, update: str, layers: str = ALL_LAYERS) -> list[Rates]:
        """The rates with the best accuracy of seed 0, for each ε."""
        grid = _grid(method)
        found = np.array([self.accuracies(case, method, update, layers, rates, 0) for rates in grid])
        return [grid[index] for index in found.argmax(axis=0)]


@dataclass(frozen=True)
class Gain:
    """Gain of one case at one ε: accuracies by seed in per cent, and the rates they were reached with."""

    epsilon: float
    g_bmf: list[float]
    gl_bmf: list[float]
    own_columns: list[float]
    rates: tuple[Rates, Rates]

    @property
    def mean_and_error(self) -> tuple[float, float]:
        """GL-BMF minus G-BMF, same seeds."""
        return _paired(self.gl_bmf, self.g_bmf)

    @property
    def counts(self) -> bool:
        """Beyond two standard errors."""
        mean, error = self.mean_and_error
        return mean > 2 * error

    def against(self, other: Gain) -> tuple[float, float]:
        """This GL-BMF minus that one: mean and standard error, same seeds."""
        return _paired(self.gl_bmf, other.gl_bmf)


def _paired(ones: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    difference = np.subtract(ones, others)
    return float(difference.mean()), float(difference.std(ddof=1) / len(difference) ** 0.5)


def gain(runs: Runs, case: str, update: str, seeds: int, layers: str = ALL_LAYERS) -> list[Gain]:
    """One case: rates from seed 0, figures from seeds 1 to ``seeds``."""
    chosen = {method: runs.best(case, method, update, layers) for method in ("g_bmf", "gl_bmf", "own columns")}
    out = []
    for index, epsilon in enumerate(EPSILONS):
        figures = {
            method: [
                runs.accuracies(case, method, update, layers, rates[index], seed)[index] for seed in range(1, seeds + 1)
            ]
            for method, rates in chosen.items()
        }
        rates = (chosen["g_bmf"][index], chosen["gl_bmf"][index])
        out.append(Gain(epsilon, figures["g_bmf"], figures["gl_bmf"], figures["own columns"], rates))
    return out


def _plus_minus(mean: float, error: float, bold: bool) -> str:
    text = f"{mean:+.1f} ± {error:.1f}"
    return f"[bold]{text}[/bold]" if bold else text


def _table_of(results: dict[tuple[str, str], Sequence[Gain]], update: str, seeds: int) -> Table:
    """One line for each case, layers and ε; where several layers were tried, their difference from the first ones
    named."""
    view = Table(
        title=f"GL-BMF ({update}) against G-BMF at the same ε, test accuracy in %, {seeds} seeds", title_justify="left"
    )
    tried = list(dict.fromkeys(layers for _, layers in results))
    several = len(tried) > 1
    columns = ["case", *(["layers"] if tried != [ALL_LAYERS] else []), "ε", "G-BMF", "GL-BMF", "gain ± standard error"]
    columns += [f"against {tried[0]}"] if several else []
    for column in (*columns, "G-BMF, own columns", "rates"):
        view.add_column(column, justify="left" if column in ("case", "layers") else "right")
    for (case, layers), gains in results.items():
        first = results.get((case, tried[0]))
        for index, found in enumerate(gains):
            frozen, trained = found.rates
            compared = "–"
            if first is not None and layers != tried[0]:
                mean, error = found.against(first[index])
                compared = _plus_minus(mean, error, abs(mean) > 2 * error)
            view.add_row(
                CASES[case].title,
                *([layers] if "layers" in columns else []),
                f"{found.epsilon:g}",
                f"{np.mean(found.g_bmf):.1f}",
                f"{np.mean(found.gl_bmf):.1f}",
                _plus_minus(*found.mean_and_error, found.counts),
                *([compared] if several else []),
                f"{np.mean(found.own_columns):.1f}",
                f"{frozen[0]:g}; {trained[0]:g}, {trained[1]:g}",
            )
    return view


def main(argv: list[str] | None = None) -> None:
    """Run what is not kept, and print the table of all cases that are complete."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gl_gain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", metavar="DIR", help="folder with ocr_letters.npz and CIFAR-100")
    parser.add_argument("--weights", metavar="FILE", help="of the small ResNet, for the case images")
    parser.add_argument("--only", choices=tuple(CASES), action="append", help="a case; may be given several times")
    parser.add_argument("--update", choices=("released", "estimated"), default="released")
    parser.add_argument(
        "--layers", action="append", metavar="LAYERS",
        help="blocks that LoRA reads: all (default), first, last, or numbers from 1, as 1,2; may be given several "
             "times",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=4, help="at least two")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing new after this long")
    parser.add_argument("--keep", type=Path, default=Path("runs/gl_gain.json"), metavar="FILE", help="results so far")
    options = parser.parse_args(argv)
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds}: a standard error needs at least two")
    runs = Runs(options.keep, Options(options.data_root, options.weights), time.monotonic() + 60 * options.minutes)
    console = printing_console()
    results: dict[tuple[str, str], Sequence[Gain]] = {}
    for case, layers in product(options.only or CASES, options.layers or [ALL_LAYERS]):
        try:
            results[case, layers] = gain(runs, case, options.update, options.seeds, layers)
        except TimeoutError:
            console.print(f"{case}: not complete; the same command goes on from here")
        except PpvflError as error:  # data or weights that are not here
            console.print(f"{case}: {error}", markup=False)
    if results:
        console.print(_table_of(results, options.update, options.seeds))


if __name__ == "__main__":
    main()
