"""Compile and run our ``.mpc`` programs with an MP-SPDZ that the user has built, three parties on loopback.

``MPSPDZ_HOME`` names the checkout: it must hold ``compile.py`` and a built ``replicated-ring-party.x``. Nothing is
written there: programs, inputs and bytecode live in a cache directory of ours. Settings are MP-SPDZ's best for this
protocol: 64-bit ring, probabilistic truncation, conversion by splitting among three, and a compile
budget so large that no loop is cut into rounds. Plain TCP on loopback, as ours, needs a build with ``-DINSECURE``;
other builds run over TLS with the certificates in their ``Player-Data``, and ``MpSpdz.plain`` says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from accel.errors import PpvflError
from accel.validate import require
from bench.comparison.relay import HOST, free_ports, relay
from refmpc.net.emulation import NetworkProfile, network_profile

__all__ = ["HOME_VARIABLE", "Compiled", "MpSpdz", "MpSpdzError", "Outcome", "find_home"]

HOME_VARIABLE = "MPSPDZ_HOME"
PARTY = "replicated-ring-party.x"
PROGRAMS = Path(__file__).with_name("programs")
BUDGET = 10_000_000
FRACTION_BITS = 16  # MP-SPDZ's default for sfix: 16 of 31 bits
_TIMER = re.compile(r"^Time1 = ([0-9.e+-]+) seconds \(([0-9.e+-]+) MB, (\d+) rounds\)", re.MULTILINE)


class MpSpdzError(PpvflError, RuntimeError):
    """MP-SPDZ is missing, does not compile a program, or does not run it."""


class _PlainRefused(Exception):
    """This build does not allow unencrypted channels."""


@dataclass(frozen=True)
class Compiled:
    """A compiled program: its name in the working directory."""

    name: str
    directory: Path
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """One run: what party 0 was shown, and time (slowest party), bytes of all parties and rounds of the timed part."""

    values: np.ndarray
    seconds: float
    bytes: int
    rounds: int


def find_home(home: str | os.PathLike[str] | None = None) -> Path:
    """The built checkout, or ``MpSpdzError`` with a sentence that says what is missing."""
    named = home if home is not None else os.environ.get(HOME_VARIABLE)
    if not named:
        raise MpSpdzError(
            f"{HOME_VARIABLE} is not set: point it to a checkout of MP-SPDZ in which {PARTY} has been built"
        )
    path = Path(named).expanduser().resolve()
    if not path.is_dir():
        raise MpSpdzError(f"{HOME_VARIABLE} = {named!s}: there is no such directory")
    if not (path / "compile.py").is_file():
        raise MpSpdzError(f"{HOME_VARIABLE} = {named!s}: no compile.py there, so it is not a checkout of MP-SPDZ")
    if not os.access(path / PARTY, os.X_OK):
        raise MpSpdzError(f"{HOME_VARIABLE} = {named!s}: {PARTY} is not there or not executable; build that target")
    return path


def cache_directory() -> Path:
    """Where compiled programs are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ppvfl" / "mpspdz"


class MpSpdz:
    """A built MP-SPDZ, ready to compile and run our programs."""

    def __init__(self, home: str | os.PathLike[str] | None = None, timeout: float = 600.0):
        self.home = find_home(home)
        self.timeout = timeout
        self.plain = True  # until a run shows that this build insists on TLS

    def version(self) -> str:
        """The checkout's commit, or the heading of its change log."""
        git = shutil.which("git")
        if git is not None:
            arguments = [git, "-C", str(self.home), "log", "-1", "--format=%h %cs"]
            found = subprocess.run(arguments, capture_output=True, text=True, check=False)
            if found.returncode == 0:
                return found.stdout.strip()
        log = self.home / "CHANGELOG.md"
        headings = re.findall(r"^## (.+)$", log.read_text(), re.MULTILINE) if log.is_file() else []
        return headings[0] if headings else "unknown"

    def compile(self, program: str, *arguments: int | float | str) -> Compiled:
        """Compile ``programs/<program>.mpc`` for these sizes; compiled before with the same text: taken from the
        cache."""
        source = PROGRAMS / f"{program}.mpc"
        known = sorted(path.stem for path in PROGRAMS.glob("*.mpc"))
        require(program in known, "program", program, f"one of {', '.join(known)}")
        words = [str(a) for a in arguments]
        key = hashlib.sha256("\0".join([str(self.home), self.version(), source.read_text(), *words]).encode())
        directory = cache_directory() / f"{program}-{key.hexdigest()[:16]}"
        name = "-".join([program, *words])
        if directory.is_dir():
            return Compiled(name, directory, 0.0)
        begun = time.perf_counter()
        directory.parent.mkdir(parents=True, exist_ok=True)
        # in a directory of its own first: another process may be compiling the same program
        with tempfile.TemporaryDirectory(
            prefix=f"{program}-", dir=directory.parent, ignore_cleanup_errors=True
        ) as work:
            self._compile_in(Path(work), source, name, words)
            with contextlib.suppress(OSError):  # the other one was first
                os.rename(work, directory)
        return Compiled(name, directory, time.perf_counter() - begun)

    def _compile_in(self, directory: Path, source: Path, name: str, words: list[str]) -> None:
        (directory / "Programs" / "Source").mkdir(parents=True)
        shutil.copy(source, directory / "Programs" / "Source")
        command = [sys.executable, str(self.home / "compile.py"), "-R", "64", "-b", str(BUDGET), source.stem, *words]
        try:
            done = subprocess.run(
                command, cwd=directory, capture_output=True, text=True, timeout=self.timeout, env=_clean_environment()
            )
        except subprocess.TimeoutExpired:
            raise MpSpdzError(f"compile.py did not end within {self.timeout:g} s on {name}") from None
        if done.returncode != 0 or not (directory / "Programs" / "Schedules" / f"{name}.sch").is_file():
            last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
            raise MpSpdzError(f"compile.py refused {name}: {last}")

    def run(
        self, compiled: Compiled, inputs: Sequence[np.ndarray], network: str | NetworkProfile = "loopback"
    ) -> Outcome:
        """Run three parties; ``inputs`` are party 0's private values, in the order in which the program reads them."""
        if self.plain:
            try:
                return self._run(compiled, inputs, network_profile(network))
            except _PlainRefused:
                self.plain = False
        return self._run(compiled, inputs, network_profile(network))

    def _run(self, compiled: Compiled, inputs: Sequence[np.ndarray], profile: NetworkProfile) -> Outcome:
        data = np.concatenate([np.zeros(0), *(np.asarray(x, dtype=np.float64).ravel() for x in inputs)])
        require(bool(np.isfinite(data).all()), "inputs", "inf or nan", "finite numbers")
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mpspdz-")))
            (directory / "Programs").symlink_to(compiled.directory / "Programs")
            (directory / "Player-Data").mkdir()
            if not self.plain:
                self._link_certificates(directory / "Player-Data")
            data.tofile(directory / "Player-Data" / "Input-Binary-P0-0")
            ports = dict(enumerate(free_ports(3)))
            routes = {(i, j): ports[j] for i in range(3) for j in range(3) if i != j}
            if profile.delay or profile.bandwidth != float("inf"):
                routes = stack.enter_context(relay(ports, profile))
            errors = self._run_parties(compiled.name, directory, ports, routes)
            shown = directory / "Player-Data" / "Binary-Output-P0-0"
            values = np.fromfile(shown, dtype=np.float64) if shown.is_file() else np.zeros(0)
        timers = []
        for i, text in enumerate(errors):
            found = _TIMER.search(text)
            if found is None:
                raise MpSpdzError(f"{compiled.name}: party {i} printed no line 'Time1 = … seconds (… MB, … rounds)'")
            timers.append((float(found[1]), float(found[2]), int(found[3])))
        seconds, megabytes, rounds = zip(*timers, strict=True)
        return Outcome(values, max(seconds), round(sum(megabytes) * 1e6), max(rounds))

    def _link_certificates(self, target: Path) -> None:
        folder = self.home / "Player-Data"
        missing = [name for i in range(3) for name in (f"P{i}.pem", f"P{i}.key") if not (folder / name).is_file()]
        if missing:
            raise MpSpdzError(
                f"{HOME_VARIABLE} = {self.home}: this build refuses plain TCP, and for TLS Player-Data lacks "
                f"{', '.join(missing)}; make them with MP-SPDZ's Scripts/setup-ssl.sh 3, or build with -DINSECURE"
            )
        for path in folder.iterdir():
            if path.suffix in (".pem", ".key", ".0"):
                (target / path.name).symlink_to(path)

    def _run_parties(
        self, name: str, directory: Path, ports: dict[int, int], routes: dict[tuple[int, int], int]
    ) -> list[str]:
        """Start the parties, wait for all, and return what each wrote to its standard error."""
        processes: list[subprocess.Popen[str]] = []
        logs = [directory / f"party-{i}.log" for i in range(3)]
        try:
            for i in range(3):
                hosts = directory / f"hosts-{i}"
                own = [ports[j] if i == j else routes[i, j] for j in range(3)]
                hosts.write_text("".join(f"{HOST}:{port}\n" for port in own))
                mode = ["-u"] if self.plain else []
                command = [str(self.home / PARTY), *mode, "-p", str(i), "-ip", str(hosts), name]
                with logs[i].open("w") as log:
                    processes.append(
                        subprocess.Popen(
                            command,
                            cwd=directory,
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL,
                            stderr=log,
                            text=True,
                            env=_clean_environment(),
                        )
                    )
            deadline = time.monotonic() + self.timeout
            for i, process in enumerate(processes):
                try:
                    code = process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise MpSpdzError(f"{name}: party {i} did not end within {self.timeout:g} s") from None
                if code != 0:
                    text = logs[i].read_text()
                    if self.plain and "-DINSECURE" in text:
                        raise _PlainRefused
                    last = (text.strip() or "no message").splitlines()[-1]
                    raise MpSpdzError(f"{name}: party {i} ended with code {code}: {last}")
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return [log.read_text() for log in logs]


def _clean_environment() -> dict[str, str]:
    """Our own import path must not shadow the compiler's packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
