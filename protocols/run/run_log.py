"""``run.log`` in the folder of a run: when it began, its phases, its releases, how it ended. Public facts only."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self

from accel.errors import PpvflError
from protocols.plan.run_plan import Plan
from refmpc import Ledger

__all__ = ["RunLog"]


class RunLog:
    """Lines with their time, on disk as soon as they are written; a resumed run goes on in the same file."""

    def __init__(self, file: Path):
        self._file = file
        self._phases: set[str] = set()
        self._tenth = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            text = error.summary if isinstance(error, PpvflError) else str(error)
            self.line("failed: " + (text or type(error).__name__))

    def line(self, text: str) -> None:
        """Write one entry; further lines of it are indented."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with self._file.open("a", encoding="utf-8") as handle:
            handle.write(f"{stamp} " + text.replace("\n", "\n" + " " * (len(stamp) + 1)) + "\n")

    def begin(self, plan: Plan, resumed: bool) -> None:
        """What is about to run."""
        schedule = plan.schedule
        self.line(
            f"{plan.protocol} {'resumed' if resumed else 'begun'}: {schedule.num_steps} steps, "
            f"{schedule.num_samples} rows, batches of {schedule.batch_size}, {len(plan.client_names)} clients, plan "
            f"{plan.fingerprint[:16]}"
        )
        self.line(f"claim: {plan.claim.headline()}")
        for caveat in plan.claim.caveats:
            self.line(caveat)

    def listen(self, peer: Any, message: dict[str, Any]) -> None:
        """Reports of server 0: the start of a phase, and every tenth of the training."""
        if peer != 0:
            return
        phase, done, total = message["phase"], message["done"], message["total"]
        if "curve" in message:
            _, accuracy, loss = message["curve"][-1]
            self.line(f"{phase}: accuracy {accuracy:.2%}, loss {loss:.4g} after epoch {done:,} of {total:,}")
        elif phase not in self._phases:
            self._phases.add(phase)
            self.line(f"{phase}: {done:,} of {total:,}")
        elif phase == "training" and 10 * done // total > self._tenth:
            self._tenth = 10 * done // total
            self.line(f"{phase}: {done:,} of {total:,}")

    def end(self, ledger: Ledger, seconds: float) -> None:
        """The releases that were made, counted by name and receiver."""
        counts: dict[tuple[str, str], list[int]] = {}
        for release in ledger.releases:
            counts.setdefault((release.name, release.receiver), []).append(release.elements)
        for (name, receiver), sizes in counts.items():
            times = "once" if len(sizes) == 1 else f"{len(sizes)} times"
            self.line(f"released {times}: {name}, {sizes[0]:,} numbers, to {receiver}")
        self.line(f"finished in {seconds:.1f} s")
