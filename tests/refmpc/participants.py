"""Participants over real loopback sockets, each in a thread of the test: what every one of them ended with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from refmpc.launch.participants import traceback_text
from refmpc.net.framing import ThreadTransport, thread_links
from refmpc.net.greeting import Greeting
from refmpc.net.rendezvous import connect_client, connect_party, listen, listen_here
from refmpc.net.sockets import SocketTransport

PATIENCE = 30.0


def all_end(works: Mapping[Any, Callable[[], Any]], within: float = PATIENCE) -> dict[Any, Any]:
    """Run each work in its own thread; its result, or the exception it ended with. Fails if one does not end."""
    outcomes: dict[Any, Any] = {}

    def play(name: Any) -> None:
        try:
            outcomes[name] = works[name]()
        except Exception as error:
            error.text = traceback_text()  # type: ignore[attr-defined]
            outcomes[name] = error

    threads = [threading.Thread(target=play, args=(name,), daemon=True) for name in works]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, begun + within - time.monotonic()))
    assert outcomes.keys() == works.keys(), f"only {sorted(map(str, outcomes))} ended within {within} s"
    return outcomes


def meet(
    greetings: Mapping[Any, Greeting],
    *,
    credentials: Mapping[Any, Any] | None = None,
    timeout: float = 10.0,
    before: Callable[[list[Any]], None] | None = None,
    clients: tuple[str, ...] = (),
    directory: Path | None = None,
) -> dict[Any, Any]:
    """Connect the participants named in ``greetings`` with each other: a dict of sockets each, or an exception. Over
    loopback TCP, or Unix sockets in ``directory``."""
    if directory is None:
        listeners = [listen() for _ in range(3)]
        addresses: Any = {i: ("127.0.0.1", listener.getsockname()[1]) for i, listener in enumerate(listeners)}
    else:
        found = [listen_here(directory, f"{i}") for i in range(3)]
        listeners, addresses = [listener for listener, _ in found], dict(enumerate(address for _, address in found))
    mine = credentials or {}
    works: dict[Any, Callable[[], Any]] = {}
    for name, greeting in greetings.items():
        if isinstance(name, int):

            def work(name: Any = name, greeting: Greeting = greeting) -> Any:
                try:
                    return connect_party(
                        name,
                        listeners[name],
                        addresses,
                        greeting,
                        credentials=mine.get(name),
                        clients=clients,
                        timeout=timeout,
                    )
                finally:
                    listeners[name].close()
        else:

            def work(name: Any = name, greeting: Greeting = greeting) -> Any:
                return connect_client(name, addresses, greeting, credentials=mine.get(name), timeout=timeout)

        works[name] = work
    if before is not None:
        before(list(addresses.values()))
    try:
        return all_end(works)
    finally:
        for listener in listeners:
            listener.close()


def transports(
    kind: str,
    timeout: float = 0.5,
    credentials: Any = None,
    peers: tuple[Any, ...] = (0, 1, 2),
    directory: Path | None = None,
) -> Any:
    """One connected transport per participant."""
    if kind == "threads":
        ends = thread_links(peers)
        return {peer: ThreadTransport(*ends(peer), timeout) for peer in peers}
    clients = tuple(peer for peer in peers if not isinstance(peer, int))
    met = meet(
        dict.fromkeys(peers, Greeting("the run", {})), credentials=credentials, clients=clients, directory=directory
    )
    for outcome in met.values():
        if isinstance(outcome, Exception):
            raise outcome
    return {peer: SocketTransport(met[peer], timeout) for peer in peers}
