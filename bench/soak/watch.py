"""What a soak looks at while it runs: what servers have sent, step by step, and the memory of every participant."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from accel.errors import PpvflError
from bench.soak.federation import SERVERS, server_folder
from bench.soak.hosts import Processes
from protocols.plan.run_plan import Plan
from protocols.state.step_log import OpenedSteps
from refmpc.primitives.opening import added_words, word_type

__all__ = ["Memory", "OpenedTwice", "SentWords"]


class OpenedTwice(PpvflError):
    """A server has sent two values in one step, or servers have taken different sums from what was sent."""


class SentWords:
    """The rule that nothing is released twice with different values, looked at from outside, in the servers' files.

    A step that a server has marked may have been sent. From then on its words must stay what they are, whatever
    happens, and what each server takes from the step must be the sum of the three servers' words. Steps are read about
    once a second, which is often enough to see each of them before its file is replaced.
    """

    def __init__(self, directory: Path, plan: Plan, words: int | None = None):
        """``words``: how many a server sends in a step, if not as many as the plan has parameters."""
        self._directory, self._count = directory, plan.parameters if words is None else words
        self.bits = plan.scales.truncated_bits
        self._digests: dict[tuple[str, int], bytes] = {}
        self._words: dict[int, dict[str, np.ndarray]] = defaultdict(dict)  # of steps whose sum is not yet known
        self._sums: dict[int, np.ndarray] = {}
        self._checked: dict[str, set[int]] = {name: set() for name in SERVERS}

    def look(self) -> int:
        """Read what is there now; returns the last step that server 0 has sent. Raises ``OpenedTwice``."""
        found: dict[str, list[tuple[int, np.ndarray, np.ndarray]]] = {}
        for name in SERVERS:
            folder = server_folder(self._directory, name)
            if folder is None:
                continue
            try:
                kept = OpenedSteps(folder, word_type(self.bits), self._count, synced=False)
                found[name] = list(kept.sent())
            except FileNotFoundError:
                continue  # the server has just removed a file
        for name, steps in found.items():
            for step, words, _ in steps:
                self._note(name, step, words)
        for name, steps in found.items():  # when the words of all three are known
            for step, _, before in steps:
                if len(before):
                    self._compare(name, step - 1, before)
        first = found.get(SERVERS[0])
        return first[-1][0] if first else -1

    def _note(self, name: str, step: int, words: np.ndarray) -> None:
        digest = hashlib.sha256(words.tobytes()).digest()
        known = self._digests.setdefault((name, step), digest)
        if known != digest:
            raise OpenedTwice(f"{name} had sent other words in step {step} before")
        if step not in self._sums:
            self._words[step][name] = words.copy()
            if len(self._words[step]) == len(SERVERS):
                self._sums[step] = added_words(list(self._words.pop(step).values()), self.bits)

    def _compare(self, name: str, step: int, taken: np.ndarray) -> None:
        if step in self._sums and step not in self._checked[name]:
            if not np.array_equal(self._sums[step], taken):
                raise OpenedTwice(f"{name} took another sum from step {step} than the three servers' words give")
            self._checked[name].add(step)

    @property
    def seen(self) -> dict[str, int]:
        """For each server, how many steps' words were seen."""
        return {name: sum(1 for who, _ in self._digests if who == name) for name in SERVERS}

    @property
    def compared(self) -> int:
        """Steps of which all three servers' words and all three servers' sums were compared."""
        return len(set.intersection(*self._checked.values()))


@dataclass
class Memory:
    """Resident memory of every participant over time, in bytes; lives are told apart by their process."""

    begun: float = field(default_factory=time.monotonic)
    samples: dict[str, list[tuple[float, int, int]]] = field(default_factory=lambda: defaultdict(list))

    def look(self, run: Processes, names: Sequence[str]) -> None:
        """One sample of each that runs."""
        for name in names:
            pid = run.pid(name)
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except (FileNotFoundError, ProcessLookupError, IndexError):
                continue
            if pages:
                self.samples[name].append((time.monotonic() - self.begun, pid, pages * 4096))

    def growth(self, name: str) -> tuple[float, float, float, float]:
        """The participant's longest life: its seconds, and the median memory in its second and in its last quarter,
        and the most that any life took; in MB."""
        lives: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for at, pid, size in self.samples[name]:
            lives[pid].append((at, size))
        life = max(lives.values(), key=lambda samples: samples[-1][0] - samples[0][0])
        quarter = max(1, len(life) // 4)
        early = statistics.median(size for _, size in life[quarter : 2 * quarter] or life)
        late = statistics.median(size for _, size in life[-quarter:])
        most = max(size for _, _, size in self.samples[name])
        return life[-1][0] - life[0][0], early / 1e6, late / 1e6, most / 1e6

    def plot(self, file: Path, faults: Sequence[tuple[float, str]]) -> None:
        """A line for each participant, broken where a process ended; a mark for each fault."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(9, 4), constrained_layout=True)
        for number, (name, samples) in enumerate(sorted(self.samples.items())):
            times, sizes, previous = [], [], None
            for at, pid, size in samples:
                if previous not in (None, pid):
                    times.append(at / 60)
                    sizes.append(float("nan"))
                previous = pid
                times.append(at / 60)
                sizes.append(size / 1e6)
            axes.plot(times, sizes, label=name, color=f"C{number}", linewidth=1)
        top = axes.get_ylim()[1]
        for at, kind in faults:
            axes.text(at / 60, top, kind[0], fontsize=6, ha="center", va="bottom", color="0.4")
        axes.set(xlabel="minutes", ylabel="resident memory, MB", ylim=(0, top))
        axes.legend(ncols=5, frameon=False, loc="lower center")
        figure.savefig(file, dpi=120)
        pyplot.close(figure)
