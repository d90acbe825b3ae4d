"""``--noise joint``: noise of variance σ² that no server knows, instead of 1.5σ² of which each knows a third.

    z_t = J_t + ζ_0 + ζ_1 + ζ_2,   J = (s·σΔ)·Ẑ on shares, s² = 1 − 2τ²,   ζ_i ~ round(N(0, (τσΔ)²)) at server i alone

Ẑ is ``refmpc.joint_gaussian``, without its own smoothing. That sampler's proof (head of
``refmpc.mathematics.gaussian``) needs a smoothing by exact Gaussians of the servers *after* the last rounding of the
joint part, and here more rounding follows the sampler: the product with the public deviation is cut to the noise's
grid. So the servers smooth here instead, each with an ordinary noise source of std τ·σΔ, which costs nothing. Against
one server the two others give 2τ², in all σ²; outsiders face (1 + τ²)σ², τ² = 2^-8. The error |J − exact Gaussian|
grows from e to e' = e + 2^-30 (the sampler's last cut, no longer behind the smoothing) + 2^-30/(σΔ) (the cut here), in
units of the deviation; the slope bound is linear in it. Given z = J + ζ + ζ', integer shifts of z are those of ζ + ζ',
which have the whole grid for support: the theorem of ``vfl.dp.slack`` applies as it stands, with this slope and
n·T·``JOINT_DISTANCE`` in δ.

The filter Ω̂⁻¹ has public integer taps, so each server applies it to its share of J modulo 2^64, and the share goes
into its own summand of the backward product: only the first of the two shares is ever needed. A server holds bands − 1
rows and a block.

*Crash and resume.* J comes from mask streams, which a new attempt may not reuse, so it cannot be derived again from a
key as each server's own noise is. With checkpoints every block is therefore written to disk, and used only when all
three servers have said that theirs is there: noise that was used is never redrawn. Blocks that no kept checkpoint needs
are removed. Without checkpoints nothing is written: such a run opens nothing before its last state is on all disks, so
one that begins again from step 0 with new noise has released nothing under the old.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np

import refmpc
from accel.files import read_arrays, write_arrays
from protocols.plan.run_plan import Plan, joint_scale
from protocols.state.checkpoint import CannotResume, ServerDirectory, agree_on_count, confirm_on_disk
from refmpc import Cost, Party
from refmpc.mathematics.gaussian import JOINT_FRACTION_BITS
from vfl.dp import NoiseFilter

__all__ = ["JointNoise", "joint_block_rows", "joint_noise_cost"]

SAMPLE_MEMORY = 2500  # bytes that the sampler takes for each sample while it runs
MOST_SAMPLES = 1 << 15  # drawn at a time
MOST_ROWS = 64


def joint_block_rows(parameters: int) -> int:
    """Steps whose noise is drawn together."""
    return max(1, min(MOST_ROWS, MOST_SAMPLES // parameters))


def _pieces(samples: int) -> list[int]:
    """A block in parts of at most ``MOST_SAMPLES``."""
    return [min(MOST_SAMPLES, samples - start) for start in range(0, samples, MOST_SAMPLES)]


async def _draw_piece(party: Party, plan: Plan, samples: int) -> np.ndarray:
    """This server's share of so many samples at the deviation of the plan. 15 rounds and 1420 bytes a sample."""
    factor, bits = joint_scale(plan.noise.target_std)
    unit = await refmpc.joint_gaussian(party, (samples,), 0.0)
    scaled = unit.scale_by_integers(factor).reinterpret(JOINT_FRACTION_BITS + bits)
    return np.asarray(refmpc.unseal((await refmpc.truncate(scaled, bits)).first))


def joint_noise_cost(plan: Plan) -> Cost:
    """Cost of all joint noise of a run, exactly: one dry run for every size of a piece, of which there are four at
    most."""
    rows, steps = joint_block_rows(plan.parameters), plan.schedule.num_steps
    blocks = (min(rows, steps - start) for start in range(0, steps, rows))
    pieces = Counter(size for block in blocks for size in _pieces(block * plan.parameters))
    each = {size: refmpc.dry_run(_draw_piece, plan, size)["main"] for size in pieces}
    return Cost(
        sum(count * each[size].rounds for size, count in pieces.items()),
        sum(count * each[size].bytes for size, count in pieces.items()),
    )


class JointNoise:
    """This server's share of the filtered joint noise, a row per step, drawn a block at a time."""

    def __init__(self, party: Party, plan: Plan, directory: ServerDirectory, start: int, keep: bool):
        self._party, self._plan, self._keep = party, plan, keep
        self._directory = directory.path
        self._name = f"joint-{plan.fingerprint[:16]}"
        self._block_rows = joint_block_rows(plan.parameters)
        self._step = start
        self._stored = self._agree()
        # the filter needs bands − 1 rows before the first; from the beginning of a block they may be more
        self._next = max(0, start - plan.factorisation.bands + 1) // self._block_rows
        self._filter = NoiseFilter(plan.factorisation, plan.parameters)
        self._filter.steps_done = self._next * self._block_rows
        self._ready = np.empty((0, plan.parameters), dtype=np.int64)
        self._ready_until = self._filter.steps_done

    async def prepare(self) -> None:
        """Have the noise of the present step ready; draws a block now and then. 15 rounds and 1420 bytes a sample."""
        while self._ready_until <= self._step:
            z = self._load(self._next) if self._next < self._stored else await self._draw(self._next)
            filtered = self._filter.next_block(z)
            self._ready_until += len(z)
            self._ready = filtered[max(0, len(z) - (self._ready_until - self._step)) :]
            self._next += 1

    def next_row(self) -> np.ndarray:
        """This server's summand of the joint noise of the present step, int64 at 46 bits."""
        row: np.ndarray = self._ready[0]
        self._ready = self._ready[1:]
        self._step += 1
        return row

    async def _draw(self, block: int) -> np.ndarray:
        rows = min(self._block_rows, self._plan.schedule.num_steps - block * self._block_rows)
        shares = []
        with self._party.phase("noise"):
            for size in _pieces(rows * self._plan.parameters):
                shares.append(await _draw_piece(self._party, self._plan, size))
        z = np.concatenate(shares).reshape(rows, -1).view(np.int64)
        if self._keep:
            write_arrays(self._file(block), {"first": z}, private=True, sealed=True)
            with self._party.phase("checkpoint"):
                await confirm_on_disk("joint noise is on disk")
        return z

    # disk ----------------------------------------------------------------------------------------

    def _file(self, block: int) -> Path:
        return self._directory / f"{self._name}-{block:08d}.npz"

    def _blocks(self) -> list[int]:
        return sorted(int(file.stem.rsplit("-", 1)[1]) for file in self._directory.glob(f"{self._name}-*.npz"))

    def _load(self, block: int) -> np.ndarray:
        if not self._file(block).exists():
            raise CannotResume(
                f"{self._file(block)} is missing. It holds the noise of step {self._step}, which must not be drawn "
                "again; restore the file, or start a new run"
            )
        return read_arrays(self._file(block))["first"]

    def _agree(self) -> int:
        """Blocks that all three servers have; later ones were used by nobody and are removed. 1 round."""
        own = self._blocks()
        count = agree_on_count(self._party, own[-1] + 1 if own else 0)
        needed = math.ceil(self._step / self._block_rows) if self._step < self._plan.schedule.num_steps else 0
        for block in own:
            if block >= max(count, needed):
                self._file(block).unlink()
        return max(count, needed)

    def forget_before(self, step: int) -> None:
        """Remove blocks that no step from ``step`` on needs."""
        for block in self._blocks():
            if (block + 1) * self._block_rows <= step - self._plan.factorisation.bands + 1:
                self._file(block).unlink()
