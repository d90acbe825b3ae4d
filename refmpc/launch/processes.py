"""Parties as processes of this machine, forked from one warm process, over Unix sockets, or TLS on loopback.

A participant never runs the caller's main module again: a script needs no guard, and programs may be functions of a
notebook or of the script itself. Those are sent by value (cloudpickle), functions of modules by name.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
from threadpoolctl import threadpool_limits

from accel.errors import InvalidArgument
from refmpc.core.errors import PartyFailed
from refmpc.launch import participants
from refmpc.launch.participants import Options, Outcomes, hanging, keep_freed_memory, play_client, play_party
from refmpc.net.framing import Peer, title
from refmpc.net.greeting import Greeting
from refmpc.net.rendezvous import Address, Credentials, connect_client, connect_party, listen, listen_here
from refmpc.net.sockets import SocketTransport

__all__ = ["modules_of", "run_processes", "start_ahead"]

_MAIN = threading.Lock()


def _fork_server(modules: Sequence[str]) -> Any:
    """Its context; the first call decides what the server imports before it forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["refmpc.launch.preload", *modules])
    return context


def start_ahead(*modules: str) -> None:
    """Let the process from which parties are forked start now and import ``modules``, while the caller prepares its
    run."""
    _fork_server(modules)
    forkserver.ensure_running()


def run_processes(
    program: Callable[..., Any],
    arguments: list[tuple[Any, ...]],
    clients: dict[str, Any],
    options: Options,
    tls: bool,
    on_report: Callable[[Peer, Any], None],
) -> Outcomes:
    context = _fork_server(modules_of([program, *(client for client, _ in clients.values())]))
    peers: list[Peer] = [0, 1, 2, *clients]
    workers: dict[Peer, Any] = {}
    pipes: dict[Peer, Connection] = {}
    work: tuple[Any, ...]
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="refmpc-")))
        listeners, addresses = _listeners(directory, tls)
        for listener in listeners:
            stack.callback(listener.close)
        credentials: Mapping[Peer, Credentials | None] = dict.fromkeys(peers)
        if tls:
            from refmpc.net.certificates import make_credentials

            credentials = make_credentials(peers, directory)
        stack.push(lambda kind, *_: _end_all(workers, 0.0 if kind else 1.0))
        for peer in peers:
            receiver, sender = context.Pipe(duplex=False)
            if isinstance(peer, int):
                work = (_party_process, peer, listeners[peer], addresses, list(clients))
                given = _packed(peer, (program, arguments[peer]))
            else:
                work = (_client_process, peer, None, addresses, [])
                given = _packed(peer, clients[str(peer)])
            worker = context.Process(
                target=_process,
                args=(sender, options, credentials[peer], given, 3 if isinstance(peer, int) else len(clients), *work),
                name=f"refmpc {peer}",
                daemon=True,
            )
            with _without_main_module():
                worker.start()
            sender.close()
            workers[peer], pipes[peer] = worker, receiver
        for listener in listeners:
            listener.close()  # only the party itself keeps it: when it dies, callers notice at once
        return _collect(workers, pipes, options, on_report)


def _listeners(directory: Path, tls: bool) -> tuple[list[socket.socket], dict[int, Address]]:
    """Listeners of the three parties: with TLS as between machines, else as it is fastest on this one."""
    if tls:
        listeners = [listen() for _ in range(3)]
        return listeners, {party: ("127.0.0.1", own.getsockname()[1]) for party, own in enumerate(listeners)}
    found = [listen_here(directory, str(party)) for party in range(3)]
    return [listener for listener, _ in found], {party: address for party, (_, address) in enumerate(found)}


def _packed(peer: Peer, given: Any) -> bytes:
    """A program and its argument: functions and classes of the main module by value, others by name."""
    try:
        return bytes(cloudpickle.dumps(given))
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"the program or an input of {title(peer)} cannot be sent to a process ({error}); "
            "define programs as functions of a module, or use parties='threads'"
        ) from error


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """A process that is started here is not told of the caller's main module, which it would otherwise run again."""
    with _MAIN:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def modules_of(programs: Sequence[Callable[..., Any]]) -> list[str]:
    """Where the programs are defined: the fork server imports that once, instead of every participant for itself."""
    found = {str(getattr(getattr(program, "func", program), "__module__", "__main__")) for program in programs}
    return sorted(found - {"__main__"})


def _collect(
    workers: Mapping[Peer, Any],
    pipes: dict[Peer, Connection],
    options: Options,
    on_report: Callable[[Peer, Any], None],
) -> Outcomes:
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
            deadline = now + options.timeout + participants.LATER
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
    sender: Connection,
    options: Options,
    credentials: Credentials | None,
    given: bytes,
    alike: int,
    play: Callable[..., Any],
    *work: Any,
) -> None:
    keep_freed_memory()
    _share_cores(alike)
    threading.Thread(target=_end_with_caller, daemon=True).start()
    try:
        outcome: tuple[str, Any] = ("result", play(options, credentials, sender, *work, *pickle.loads(given)))
    except BaseException as error:
        outcome = ("failure", (_picklable(error), traceback.format_exc()))
    try:
        words = cloudpickle.dumps(outcome)
    except Exception as error:
        message = f"what the program returned cannot be sent back: {type(error).__name__}: {error}"
        words = cloudpickle.dumps(("failure", (ValueError(message), traceback.format_exc())))
    sender.send_bytes(words)
    sender.close()


def _share_cores(alike: int) -> None:
    """Servers compute at the same time, and so do clients: each of ``alike`` many gets its part of the machine.

    With more BLAS threads than cores a product takes many times as long, because threads wait for each other by turning
    in circles.
    """
    threadpool_limits(limits=max(1, (os.cpu_count() or 1) // alike), user_api="blas")


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
    addresses: Mapping[int, Address],
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
    addresses: Mapping[int, Address],
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
