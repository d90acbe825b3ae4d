"""The paper's own figures, read from ``paper.toml``: the one place where they are typed in, by table number."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from accel.validate import require_choice

__all__ = ["DATA_NAMES", "METHOD_NAMES", "PRETRAINING_NAMES", "PaperTable", "paper_accuracy", "paper_table"]

_FILE = Path(__file__).with_name("paper.toml")

# Our names of data sets, pre-training and methods, as the paper writes them.
DATA_NAMES = {"cifar10": "CIFAR-10", "emnist": "EMNIST"}
PRETRAINING_NAMES = {
    "imagenet": "Pre-ImageNet",
    "cifar100": "Pre-Cifar100",
    "own": "Pre-Cifar100, our own small network and weights",
}
METHOD_NAMES = {
    "plain": "Plain",
    "g_shuff": "G-Shuff",
    "g_bmf": "G-BMF",
    "gl_bmf": "GL-BMF",
    "gl_sub": "GL-Sub",
    "ldp_g": "LDP-G",
    "ldp_gl": "LDP-GL",
    "admm": "ADMM",
    "fedbcd": "FedBCD",
    "split": "Split Learning",
    "ada_vfed": "Ada-VFed",
}

Figures = float | list[float]


@dataclass(frozen=True)
class PaperTable:
    """One table: ``figures[data][pretraining][method]`` is a list along ``epsilons``, one number without privacy, or
    [seconds, megabytes] in the tables of a network.
    """

    number: int
    caption: str
    epochs: int
    clip_norm: float
    epsilons: tuple[float, ...]
    network: str
    figures: dict[str, dict[str, dict[str, Figures]]]

    def accuracy(self, data: str, pretraining: str, method: str, epsilon: float | None) -> float | None:
        """The figure at one ε (None: without privacy); None where the paper has none."""
        found = self.figures.get(data, {}).get(pretraining, {}).get(method)
        if isinstance(found, list):
            return found[self.epsilons.index(epsilon)] if epsilon in self.epsilons else None
        return found if epsilon is None else None


@cache
def paper_table(number: int) -> PaperTable:
    """The paper's table of this number."""
    stored = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    require_choice("table", str(number), tuple(stored))
    entry = stored[str(number)]
    return PaperTable(
        number,
        entry["caption"],
        entry.get("epochs", 0),
        entry.get("clip_norm", 0.0),
        tuple(float(e) for e in entry.get("epsilons", ())),
        entry.get("network", ""),
        {name: value for name, value in entry.items() if isinstance(value, dict)},
    )


def paper_accuracy(data: str, pretraining: str, method: str, setting: int, epsilon: float | None) -> float | None:
    """Table 1 (20 epochs), or Table 3 for the baselines, whose accounting there is not example-level."""
    name = METHOD_NAMES[method] + (f" (Setting {setting})" if method in ("g_bmf", "gl_bmf") else "")
    table = paper_table(3 if method in ("admm", "fedbcd", "split", "ada_vfed") else 1)
    return table.accuracy(DATA_NAMES.get(data, data), PRETRAINING_NAMES[pretraining], name, epsilon)
