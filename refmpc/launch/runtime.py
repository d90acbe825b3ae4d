"""``run``: one call runs a program at three parties (and clients) and returns what each returns.

The same program runs in three threads of this process (tests, notebooks) or in three processes over loopback TCP,
optionally TLS. An exception at any party is raised in the caller with that party's traceback, and the others end.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import multiprocessing
import os
import pickle
import secrets
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np

from accel.errors import InvalidArgument
from accel.validate import require, require_choice, require_real
from refmpc.core.errors import OutOfStep, PartyFailed, PeerAborted, PeerLost, PeerTimeout
from refmpc.core.ledger import Ledger
from refmpc.core.party import Party
from refmpc.net.emulation import NetworkProfile, network_profile
from refmpc.net.framing import Peer, ThreadTransport, Transport, thread_links, title
from refmpc.net.greeting import Greeting
from refmpc.net.rendezvous import Credentials, connect_client, connect_party, listen
from refmpc.net.sockets import SocketTransport
from refmpc.primitives.io import Client

__all__ = ["Options", "RunResult", "explain", "hanging", "modules_of", "play_party", "run", "start_ahead"]

_LATER = 3.0  # seconds after the time-out in which a party whose peers failed must have ended
_Outcomes = tuple[dict[Peer, Any], dict[Peer, tuple[BaseException, str]]]


@dataclass(frozen=True)
class Options:
    """What every participant of a run needs to know; public."""

    timeout: float
    profile: NetworkProfile
    run_id: str = field(repr=False)
    parameters: Mapping[str, Any]
    releases: Mapping[str, str]
    insecure_seed: int | None
    insecure_check_ranges: bool
    insecure_record: bool


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
    for a peer; once a party has failed, the others have as long (and a little) to end. ``on_report(peer, message)`` gets
    what programs pass to ``party.report``, for progress. The ``insecure_…`` options are for tests: fixed randomness,
    opened operands, recorded messages.
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
    launch = _run_threads if parties == "threads" else _run_processes
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


# one participant --------------------------------------------------------------------------------


def play_party(
    id: int,
    transport: Transport,
    program: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: Options,
    report: Callable[[Any], None],
) -> tuple[Any, Ledger, Any]:
    """Run a program at one party that is connected; returns its output, its ledger and its transcript."""
    try:
        party = Party(
            id,
            transport,
            parameters=options.parameters,
            run_id=options.run_id.encode(),
            report=report,
            insecure_seed=options.insecure_seed,
            insecure_check_ranges=options.insecure_check_ranges,
            insecure_record=options.insecure_record,
        )
        party.declare(options.releases)
        with np.errstate(over="ignore"):  # the ring wraps around by design; numpy warns for single elements
            output = program(party, *arguments)
            if inspect.iscoroutine(output):
                output = party.complete(output)
        return output, party.ledger, party.transcript
    except BaseException as error:
        transport.abort(_public_reason(error))
        raise


def play_client(name: str, transport: Transport, program: Callable[..., Any], argument: Any) -> tuple[Any, None, None]:
    """Run a program at one client that is connected, as ``play_party`` at a party."""
    try:
        return program(Client(name, transport), argument), None, None
    except BaseException as error:
        transport.abort(_public_reason(error))
        raise


def _public_reason(error: BaseException) -> str:
    """What peers may learn of an error: its kind, and its text only if it comes from the library itself, since the
    text of a program's own error may quote private values."""
    if type(error) in (PeerTimeout, PeerLost, PeerAborted, OutOfStep):
        return str(error)
    return type(error).__name__


def explain(failures: Mapping[Peer, tuple[BaseException, str]]) -> PartyFailed:
    """One exception for the caller: the root cause first, that is one not caused by another party's end."""

    def rank(peer: Peer) -> tuple[int, str]:
        # the later, the more of an echo; one that did not end may have had nothing to do with a peer that died
        echoes = (_DidNotEnd, PeerTimeout, PeerLost, PeerAborted)
        return next((i for i, kind in enumerate(echoes, 1) if isinstance(failures[peer][0], kind)), 0), str(peer)

    order = sorted(failures, key=rank)
    first = order[0]
    error, text = failures[first]
    kind = PartyFailed if isinstance(error, PartyFailed) else type(error)
    lines = [f"{title(first)} failed: {kind.__name__}: {error}"]
    lines += [f"{title(peer)} ended too: {failures[peer][0]}" for peer in order[1:]]
    explained = PartyFailed("\n".join(lines), f"Traceback of {title(first)}:\n{text}")
    explained.tracebacks = {peer: failures[peer][1] for peer in order}
    explained.__cause__ = error
    return explained


class _DidNotEnd(PartyFailed):
    """A participant that was still running when the time of the others was over."""


def hanging() -> tuple[BaseException, str]:
    return _DidNotEnd(
        "it did not end when the others had: it hangs, is stopped or was still computing"
    ), "(no traceback: it did not end)"


# threads ----------------------------------------------------------------------------------------


def _run_threads(
    program: Callable[..., Any],
    arguments: list[tuple[Any, ...]],
    clients: dict[str, Any],
    options: Options,
    tls: bool,
    on_report: Callable[[Peer, Any], None],
) -> _Outcomes:
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
            failures[peer] = error, traceback.format_exc()
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
                deadline = time.monotonic() + options.timeout + _LATER
            if deadline is not None and time.monotonic() > deadline:
                return results, failures | {peer: hanging() for peer in alive}
    except BaseException:  # interrupted: the threads end at their next message
        for transport in transports.values():
            transport.abort("the caller was interrupted")
        raise
    return results, failures


# processes --------------------------------------------------------------------------------------


def _fork_server(modules: Sequence[str]) -> Any:
    """Its context; the first call decides what the server imports before it forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["refmpc.launch.preload", *modules])
    return context


def start_ahead(*modules: str) -> None:
    """Let the process from which parties are forked start now and import ``modules``, while the caller prepares its run."""
    _fork_server(modules)
    forkserver.ensure_running()


def _run_processes(
    program: Callable[..., Any],
    arguments: list[tuple[Any, ...]],
    clients: dict[str, Any],
    options: Options,
    tls: bool,
    on_report: Callable[[Peer, Any], None],
) -> _Outcomes:
    context = _fork_server(modules_of([program, *(client for client, _ in clients.values())]))
    peers: list[Peer] = [0, 1, 2, *clients]
    listeners = [listen() for _ in range(3)]
    addresses = {i: ("127.0.0.1", listeners[i].getsockname()[1]) for i in range(3)}
    workers: dict[Peer, Any] = {}
    pipes: dict[Peer, Connection] = {}
    with contextlib.ExitStack() as stack:
        for listener in listeners:
            stack.callback(listener.close)
        credentials: Mapping[Peer, Credentials | None] = dict.fromkeys(peers)
        if tls:
            from refmpc.net.certificates import make_credentials

            credentials = make_credentials(peers, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.push(lambda kind, *_: _end_all(workers, 0.0 if kind else 1.0))
        for peer in peers:
            receiver, sender = context.Pipe(duplex=False)
            if isinstance(peer, int):
                work = (_party_process, peer, listeners[peer], addresses, list(clients), program, arguments[peer])
            else:
                work = (_client_process, peer, None, addresses, [], *clients[str(peer)])
            try:
                worker = context.Process(
                    target=_process,
                    args=(sender, options, credentials[peer], *work),
                    name=f"refmpc {peer}",
                    daemon=True,
                )
                worker.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise InvalidArgument(
                    f"the program or an input of {title(peer)} cannot be sent to a process ({error}); "
                    "define programs as functions of a module, or use parties='threads'"
                ) from error
            sender.close()
            workers[peer], pipes[peer] = worker, receiver
        for listener in listeners:
            listener.close()  # only the party itself keeps it: when it dies, callers notice at once
        return _collect(workers, pipes, options, on_report)


def modules_of(programs: Sequence[Callable[..., Any]]) -> list[str]:
    """Where the programs are defined: the fork server imports that once, instead of every participant for itself. The
    module that runs as the command is left out: a participant runs it again, and Python warns if it was imported."""
    command = getattr(sys.modules["__main__"], "__spec__", None)
    found = {str(getattr(getattr(program, "func", program), "__module__", "__main__")) for program in programs}
    return sorted(found - {"__main__", getattr(command, "name", "__main__")})


def _collect(
    workers: Mapping[Peer, Any],
    pipes: dict[Peer, Connection],
    options: Options,
    on_report: Callable[[Peer, Any], None],
) -> _Outcomes:
    results: dict[Peer, Any] = {}
    failures: dict[Peer, tuple[BaseException, str]] = {}
    names = {pipe: peer for peer, pipe in pipes.items()}
    deadline = None
    stopped_since: dict[Peer, float] = {}
    while names:
        for pipe in wait(list(names), timeout=0.5):
            assert isinstance(pipe, Connection)
            peer = names[pipe]
            kind, value = _outcome(pipe, workers[peer])
            if kind == "report":
                on_report(peer, value)
                continue
            del names[pipe]
            (results if kind == "result" else failures)[peer] = value
        now = time.monotonic()
        for pipe, peer in list(names.items()):  # also one that is stopped when nobody waits for it any more
            if not _is_stopped(workers[peer].pid):
                stopped_since.pop(peer, None)
            elif now - stopped_since.setdefault(peer, now) > options.timeout:
                failures[peer] = hanging()
                del names[pipe]
        if failures and deadline is None:
            # peers notice within their time-out; whoever has not ended soon after is stopped
            deadline = now + options.timeout + _LATER
        if deadline is not None and now > deadline:
            failures.update({peer: hanging() for peer in names.values()})
            break
    return results, failures


def _outcome(pipe: Connection, worker: Any) -> tuple[str, Any]:
    """The next thing a participant says: ("report", …), ("result", …) or ("failure", (error, traceback))."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        worker.join(5)
        code = worker.exitcode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return "failure", (PartyFailed(f"its process died ({how})"), "(no traceback: the process died)")
    except Exception as error:
        message = f"what the program returned cannot be read back: {type(error).__name__}: {error}"
        return "failure", (ValueError(message), traceback.format_exc())


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal (Linux; elsewhere not known)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def _end_all(workers: Mapping[Peer, Any], patience: float) -> None:
    until = time.monotonic() + patience
    for worker in workers.values():
        worker.join(max(0.0, until - time.monotonic()))
    for worker in workers.values():
        if worker.is_alive():
            worker.kill()
        worker.join()


def _process(
    sender: Connection, options: Options, credentials: Credentials | None, play: Callable[..., Any], *work: Any
) -> None:
    keep_freed_memory()
    threading.Thread(target=_end_with_caller, daemon=True).start()
    try:
        outcome: tuple[str, Any] = ("result", play(options, credentials, sender, *work))
    except BaseException as error:
        outcome = ("failure", (_picklable(error), traceback.format_exc()))
    try:
        words = ForkingPickler.dumps(outcome)
    except Exception as error:
        message = f"what the program returned cannot be sent back: {type(error).__name__}: {error}"
        words = ForkingPickler.dumps(("failure", (ValueError(message), traceback.format_exc())))
    sender.send_bytes(words)
    sender.close()


def _end_with_caller() -> None:
    """A party must not go on computing when nobody is there to take its result."""
    caller = multiprocessing.parent_process()
    if caller is not None:
        caller.join()
        os._exit(1)


def _party_process(
    options: Options,
    credentials: Credentials | None,
    sender: Connection,
    id: int,
    listener: socket.socket,
    addresses: Mapping[int, tuple[str, int]],
    clients: list[str],
    program: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    greeting = Greeting(options.run_id, options.parameters)
    connections = connect_party(
        id, listener, addresses, greeting, credentials=credentials, clients=clients, timeout=options.timeout
    )
    listener.close()
    transport = SocketTransport(connections, options.timeout, options.profile)
    try:
        return play_party(id, transport, program, arguments, options, lambda message: sender.send(("report", message)))
    finally:
        transport.close()


def _client_process(
    options: Options,
    credentials: Credentials | None,
    sender: Connection,
    name: str,
    listener: None,
    addresses: Mapping[int, tuple[str, int]],
    clients: list[str],
    program: Callable[..., Any],
    argument: Any,
) -> Any:
    greeting = Greeting(options.run_id, options.parameters)
    connections = connect_client(name, addresses, greeting, credentials=credentials, timeout=options.timeout)
    transport = SocketTransport(connections, options.timeout, options.profile)
    try:
        return play_client(name, transport, program, argument)
    finally:
        transport.close()


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def keep_freed_memory() -> None:
    """Let the C library keep freed blocks for reuse (glibc): large temporary arrays then cost no page faults."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
