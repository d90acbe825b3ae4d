"""``run``: one call runs a program at three parties (and clients) and returns what each returns.

The same program runs in three threads of this process (tests, notebooks) or in three processes over Unix sockets,
or over TLS. An exception at any party is raised in the caller with that party's traceback, and the others end.
"""

from __future__ import annotations

import functools
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.validate import require, require_choice, require_real
from refmpc.core.ledger import Ledger
from refmpc.launch import participants
from refmpc.launch.participants import Options, Outcomes, explain, hanging, play_client, play_party, traceback_text
from refmpc.launch.processes import run_processes
from refmpc.net.emulation import NetworkProfile, network_profile
from refmpc.net.framing import Peer, ThreadTransport, thread_links
from refmpc.net.greeting import Greeting

__all__ = ["RunResult", "run"]


@dataclass
class RunResult:
    """What a run returned. ``outputs[i]`` is party i's return value, ``client_outputs[name]`` a client's."""

    outputs: list[Any]
    client_outputs: dict[str, Any]
    ledgers: list[Ledger]
    transcripts: list[list[tuple[str, Peer, np.ndarray]]]
    seconds: float

    @property
    def rounds(self) -> int:
        """Rounds of party 0, without set-up (they are the same at all parties)."""
        return sum(c.rounds for name, c in self.ledgers[0].phases.items() if name != "set-up")

    @property
    def bytes(self) -> int:
        """Payload bytes sent by the three servers, without set-up."""
        return sum(c.bytes_sent for ledger in self.ledgers for name, c in ledger.phases.items() if name != "set-up")


def run(
    program: Callable[..., Any],
    inputs: Sequence[Any] | None = None,
    *,
    parties: str = "threads",
    clients: Mapping[str, tuple[Callable[..., Any], Any]] | None = None,
    network: str | NetworkProfile = "loopback",
    releases: Mapping[str, str] | None = None,
    parameters: Mapping[str, Any] | None = None,
    tls: bool = False,
    timeout: float = 60.0,
    on_report: Callable[[Peer, Any], None] | None = None,
    insecure_seed: int | None = None,
    insecure_check_ranges: bool = False,
    insecure_record: bool = False,
) -> RunResult:
    """Run ``program(party, inputs[i])`` (or ``program(party)`` without inputs) at the three parties.

    ``program`` may be a plain or an async function. ``clients`` maps names to (program, argument); a client program
    gets a ``Client`` and its argument. ``releases`` declares what may be opened, each with the claim that covers it.
    ``parties="processes"`` needs programs that can be imported (functions of a module). ``timeout`` bounds every wait
    for a peer; once a party has failed, the others have as long (and a little) to end. ``on_report(peer, message)``
    gets what programs pass to ``party.report``, for progress. The ``insecure_…`` options are for tests: fixed
    randomness, opened operands, recorded messages.
    """
    require_choice("parties", parties, ("threads", "processes"))
    require_real("timeout", timeout, 0, open_low=True)
    require(inputs is None or len(inputs) == 3, "inputs", inputs, "three items, one per party")
    require(not tls or parties == "processes", "tls", tls, "False with threads", "use parties='processes'")
    for name in clients or {}:
        require(isinstance(name, str) and name != "", "clients", name, "named by a text that is not empty")
    Greeting("", parameters or {})  # checked here, whatever the transport
    for name, value in (
        ("insecure_seed", insecure_seed is not None),
        ("insecure_check_ranges", insecure_check_ranges),
        ("insecure_record", insecure_record),
    ):
        if value:
            warnings.warn(f"{name} is set: this run protects nothing", stacklevel=2)
    options = Options(
        timeout=timeout,
        profile=network_profile(network),
        run_id=secrets.token_hex(16) if insecure_seed is None else f"insecure seed {insecure_seed}",
        parameters=dict(parameters or {}),
        releases=dict(releases or {}),
        insecure_seed=insecure_seed,
        insecure_check_ranges=insecure_check_ranges,
        insecure_record=insecure_record,
    )
    arguments: list[tuple[Any, ...]] = [() if inputs is None else (item,) for item in (inputs or (None,) * 3)]
    begun = time.perf_counter()
    launch = _run_threads if parties == "threads" else run_processes
    listener = on_report or (lambda peer, message: None)
    results, failures = launch(program, arguments, dict(clients or {}), options, tls, listener)
    if failures:
        raise explain(failures)
    servers = [results[i] for i in range(3)]
    return RunResult(
        outputs=[output for output, _, _ in servers],
        client_outputs={name: results[name][0] for name in clients or {}},
        ledgers=[ledger for _, ledger, _ in servers],
        transcripts=[transcript or [] for _, _, transcript in servers],
        seconds=time.perf_counter() - begun,
    )


def _run_threads(
    program: Callable[..., Any],
    arguments: list[tuple[Any, ...]],
    clients: dict[str, Any],
    options: Options,
    tls: bool,
    on_report: Callable[[Peer, Any], None],
) -> Outcomes:
    ends = thread_links([0, 1, 2, *clients])
    results: dict[Peer, Any] = {}
    failures: dict[Peer, tuple[BaseException, str]] = {}
    transports = {peer: ThreadTransport(*ends(peer), options.timeout, options.profile) for peer in (0, 1, 2, *clients)}

    def play(peer: Peer) -> None:
        transport = transports[peer]
        try:
            if isinstance(peer, int):
                report = functools.partial(on_report, peer)
                results[peer] = play_party(peer, transport, program, arguments[peer], options, report)
            else:
                results[peer] = play_client(str(peer), transport, *clients[str(peer)])
        except BaseException as error:
            failures[peer] = error, traceback_text()
        finally:
            transport.close()

    threads = {peer: threading.Thread(target=play, args=(peer,), daemon=True) for peer in transports}
    for thread in threads.values():
        thread.start()
    deadline = None
    try:
        while alive := {peer: thread for peer, thread in threads.items() if thread.is_alive()}:
            next(iter(alive.values())).join(0.1)
            if failures and deadline is None:
                deadline = time.monotonic() + options.timeout + participants.LATER
            if deadline is not None and time.monotonic() > deadline:
                return results, failures | {peer: hanging() for peer in alive}
    except BaseException:  # interrupted: the threads end at their next message
        for transport in transports.values():
            transport.abort("the caller was interrupted")
        raise
    return results, failures
