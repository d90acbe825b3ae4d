"""Run the workloads on SecretFlow SPU (ABY3, FM64, 16 fraction bits): three processes of the interpreter SPU_PYTHON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from accel.errors import PpvflError
from accel.validate import require
from bench.comparison.relay import HOST, free_ports, relay
from bench.comparison.workloads import Workload
from refmpc.net.emulation import NetworkProfile, network_profile

__all__ = ["PYTHON_VARIABLE", "SUPPORTED", "Spu", "SpuError", "SpuResult"]

PYTHON_VARIABLE = "SPU_PYTHON"
WORKER = Path(__file__).with_name("worker.py")
# SPU's interface to jax has no shuffle of rows and no secret Gaussian sampler, so these two are left out.
SUPPORTED = (
    "multiply",
    "matmul",
    "comparison",
    "relu",
    "division",
    "reciprocal",
    "inverse_sqrt",
    "clip_factor",
    "exp",
    "softmax",
    "step",
)
_LINK = re.compile(r"Link details: total send bytes (\d+), recv bytes \d+, send actions (\d+)")


class SpuError(PpvflError, RuntimeError):
    """SPU is missing or did not run a workload."""


@dataclass(frozen=True)
class SpuResult:
    """Times of all repetitions (slowest party each), bytes of all parties, and what was computed."""

    times: list[float]
    bytes: int
    values: np.ndarray


class Spu:
    """An interpreter with SPU installed."""

    def __init__(self, python: str | None = None, timeout: float = 900.0):
        named = python if python is not None else os.environ.get(PYTHON_VARIABLE)
        if not named:
            raise SpuError(f"{PYTHON_VARIABLE} is not set: point it to a Python interpreter that can import spu")
        found = shutil.which(named)
        if found is None:
            raise SpuError(f"{PYTHON_VARIABLE} = {named}: there is no such executable")
        self.python, self.timeout = found, timeout

    def version(self) -> str:
        """The version of SPU that the interpreter imports."""
        code = "import importlib.metadata, spu; print(importlib.metadata.version('spu'))"
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, env=_clean_environment())
        if done.returncode != 0:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            raise SpuError(f"{PYTHON_VARIABLE} = {self.python}: it cannot import spu ({last})")
        return done.stdout.strip()

    def run(
        self, workloads: Sequence[Workload], repeat: int = 3, network: str | NetworkProfile = "loopback"
    ) -> list[SpuResult]:
        """All workloads in one run of three parties, ``repeat`` times each after one warm-up."""
        for workload in workloads:
            require(workload.program in SUPPORTED, "program", workload.program, f"one of {', '.join(SUPPORTED)}")
        profile = network_profile(network)
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spu-")))
            ports = dict(enumerate(free_ports(3)))
            routes = {(i, j): ports[j] for i in range(3) for j in range(3) if i != j}
            if profile.delay or profile.bandwidth != float("inf"):
                routes = stack.enter_context(relay(ports, profile))
            addresses = [[f"{HOST}:{ports[j] if i == j else routes[i, j]}" for j in range(3)] for i in range(3)]
            rows = [{"program": w.program, "arguments": w.arguments} for w in workloads]
            job = {"addresses": addresses, "repeat": repeat, "workloads": rows}
            (directory / "job.json").write_text(json.dumps(job))
            for k, workload in enumerate(workloads):
                np.savez(directory / f"inputs-{k}.npz", *workload.inputs)
            logs = self._run_parties(directory)
            times = [json.loads((directory / f"times-{rank}.json").read_text()) for rank in range(3)]
            sent = [_bytes_of_each_workload(log, len(workloads)) for log in logs]
            return [
                SpuResult(
                    [max(each) for each in zip(*(t[k] for t in times), strict=True)],
                    sum(party[k] for party in sent),
                    np.load(directory / f"outputs-{k}.npy"),
                )
                for k in range(len(workloads))
            ]

    def _run_parties(self, directory: Path) -> list[str]:
        processes: list[subprocess.Popen[bytes]] = []
        logs = [directory / f"party-{rank}.log" for rank in range(3)]
        try:
            for rank in range(3):
                with logs[rank].open("w") as log:
                    processes.append(
                        subprocess.Popen(
                            [self.python, str(WORKER), str(directory), str(rank)],
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            env=_clean_environment(),
                        )
                    )
            self._wait(processes, logs)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return [log.read_text(errors="replace") for log in logs]

    def _wait(self, processes: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
        """Until all have ended; the first that fails is named, and the others need not time out first."""
        deadline = time.monotonic() + self.timeout
        while True:
            codes = [process.poll() for process in processes]
            for rank, code in enumerate(codes):
                if code not in (None, 0):
                    last = (logs[rank].read_text(errors="replace").strip() or "no message").splitlines()[-1]
                    raise SpuError(f"party {rank} ended with code {code}: {last}")
            if all(code == 0 for code in codes):
                return
            if time.monotonic() > deadline:
                raise SpuError(f"the parties did not end within {self.timeout:g} s")
            time.sleep(0.05)


def _bytes_of_each_workload(log: str, workloads: int) -> list[int]:
    """What this party sent in the last run of each workload, as SPU itself counts."""
    found = []
    for k in range(workloads):
        part = log.rpartition(f"begin {k}\n")[2].split("begin ")[0]
        match = _LINK.search(part)
        if match is None:
            raise SpuError(f"workload {k}: SPU printed no line 'Link details: total send bytes …'")
        found.append(int(match[1]))
    return found


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
