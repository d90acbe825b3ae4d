"""Private alignment, one process per client over loopback: ``python -m bench.alignment``."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

from rich.console import Console
from rich.table import Table

from accel.errors import PpvflError
from accel.validate import require_integer, require_real
from vfl.alignment import align_as_leader, align_as_member
from vfl.progress import progress_bar

__all__ = ["main", "measure"]


def make_ids(client: int, count: int, overlap: float) -> list[str]:
    """The first part of the ids is everybody's, the rest the client's own."""
    common = round(count * overlap)
    return [f"customer-{i:09d}" for i in range(common)] + [f"of-client-{client}-{i:09d}" for i in range(common, count)]


def _member(client: int, names: list[str], count: int, overlap: float, pad_to: int | None, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(bytes([client]))  # the bench's own greeting; between organisations mutual TLS says who calls
        ids = make_ids(client, count, overlap)
        found = align_as_member(ids, link, name=names[client], clients=names, pad_to=pad_to)
        assert sorted(found.rows) == list(range(round(count * overlap)))


def _leader(names: list[str], count: int, overlap: float, pad_to: int | None, quiet: bool, pipe: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        links = {}
        for _ in names[:-1]:
            link, _address = listener.accept()
            links[names[link.recv(1)[0]]] = link
    ordered = {name: links[name] for name in names[:-1]}
    ids = make_ids(len(names) - 1, count, overlap)
    begun, busy = time.perf_counter(), time.process_time()
    with progress_bar("blinded values", (pad_to or count) * len(names), enabled=not quiet) as advance:
        found = align_as_leader(ids, ordered, name=names[-1], pad_to=pad_to, advance=advance)
    seconds = time.perf_counter() - begun
    pipe.send((seconds, time.process_time() - busy, len(found.rows), found.bytes_sent + found.bytes_received))


def measure(clients: int, count: int, overlap: float, pad_to: int | None = None, quiet: bool = True) -> dict[str, Any]:
    """Time from the first message to the leader's result, matched rows, and all bytes (each crosses one link once)."""
    require_integer("clients", clients, 2, 16)
    require_integer("ids", count, 1)
    require_real("overlap", overlap, 0.0, 1.0)
    names = [f"client {i}" for i in range(clients)]
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    leader = context.Process(target=_leader, args=(names, count, overlap, pad_to, quiet, there))
    leader.start()
    there.close()
    port = here.recv()
    members = [
        context.Process(target=_member, args=(i, names, count, overlap, pad_to, port)) for i in range(clients - 1)
    ]
    for process in members:
        process.start()
    try:
        seconds, busy, matched, size = here.recv()
    except EOFError:
        raise RuntimeError("the leading client failed: see its traceback above") from None
    for process in (leader, *members):
        process.join()
        if process.exitcode:
            raise RuntimeError(f"a client ended with exit code {process.exitcode}: see its traceback above")
    return {
        "clients": clients,
        "ids": count,
        "pad_to": pad_to,
        "matched": matched,
        "seconds": seconds,
        "leader_cpu_seconds": busy,
        "bytes": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--ids", type=int, default=100_000, help="of each client (default: %(default)s)")
    parser.add_argument(
        "--overlap", type=float, default=0.5, help="part of the ids that all have (default: %(default)s)"
    )
    parser.add_argument(
        "--pad-to", type=int, default=None, help="pad the id list to N so others do not learn your row count"
    )
    parser.add_argument("--json", action="store_true", help="facts for machines instead of a table")
    arguments = parser.parse_args()
    try:
        found = measure(arguments.clients, arguments.ids, arguments.overlap, arguments.pad_to, arguments.json)
    except PpvflError as error:
        raise SystemExit(f"bench.alignment: {error}") from None
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    size, entries = found["bytes"], found["ids"] * found["clients"]
    view = Table(title=f"private alignment of {found['clients']} clients over loopback", show_header=False)
    view.add_column(style="bold")
    view.add_column()
    padded = f", padded to {found['pad_to']:,}" if found["pad_to"] else ""
    view.add_row("ids", f"{found['ids']:,} at each client{padded}")
    view.add_row("matched", f"{found['matched']:,}")
    view.add_row("time", f"{found['seconds']:.1f} s, of which the leader computed {found['leader_cpu_seconds']:.1f} s")
    view.add_row("bytes", f"{size / 1e6:.2f} MB, {size / entries:.1f} an id")
    Console().print(view)


if __name__ == "__main__":
    main()
