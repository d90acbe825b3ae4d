"""Private alignment over loopback and mutual TLS, one process a client, after a small one that loads what is compiled.

``--matching all`` measures "ot" and "ecdh". An interpreter that has SPU (``pip install spu``; of its own, because it
needs older packages) may be named by ``SPU_PYTHON``: with two clients it then matches the same ids with ECDH, KKRT and
RR22, in the same run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.table import Table

from accel.validate import require_choice, require_integer, require_real
from bench.harness import Option, benchmark
from refmpc.net.certificates import make_credentials
from refmpc.net.tls import Credentials, secure, set_socket_options, shake_hands, tls_context
from vfl.alignment import MATCHINGS, Alignment, PeerTls, align_as_leader, align_as_member
from vfl.tables.ids import Ids

__all__ = ["main", "measure"]

_SPU = ("ECDH", "KKRT", "RR22")
_SPU_PROGRAM = Path(__file__).with_name("spu_alignment.py")


def make_ids(client: int, count: int, common: int) -> Ids:
    """The first ids are everybody's, the rest the client's own."""
    own = (f"of-client-{client}-{i:09d}" for i in range(common, count))
    return Ids(pa.array([*(f"customer-{i:09d}" for i in range(common)), *own]))


def _client(
    me: int,
    names: Sequence[str],
    counts: Sequence[int],
    common: int,
    options: dict[str, Any],
    credentials: Credentials,
    port: int,
    pipe: Connection,
) -> None:
    """One process: the last client listens, the others call."""
    leads = me == len(names) - 1
    links: dict[str, socket.socket] = {}
    if leads:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pipe.send(listener.getsockname()[1])
            for name in names[:-1]:  # they call one after the other
                links[name] = secure(listener.accept()[0], credentials, server_side=True)
                shake_hands(links[name], name)
    else:
        links[names[-1]] = secure(socket.create_connection(("127.0.0.1", port)), credentials, server_side=False)
        shake_hands(links[names[-1]], names[-1])
        pipe.send(None)
    for link in links.values():
        set_socket_options(link)
    pins = {str(peer): (pin,) for peer, pin in credentials.pinned.items()}
    tls = PeerTls(lambda server_side: tls_context(credentials, server_side=server_side), pins)

    def align(ids: Ids, pad_to: int | None = None) -> Alignment:
        how = {"name": names[me], "matching": options["matching"], "pad_to": pad_to}
        if leads:
            return align_as_leader(ids, links, **how)
        return align_as_member(ids, links[names[-1]], clients=names, tls=tls, **how)

    align(make_ids(me, 200, 100))
    ids = make_ids(me, counts[me], common)
    Path("/proc/self/clear_refs").write_text("5")  # the largest memory so far, of making texts, is forgotten
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    found = align(ids, options["pad_to"])
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    assert sorted(found.rows.tolist()) == list(range(common))
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    about = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    pipe.send((seconds, busy, found.bytes_sent, int(about["VmHWM"].split()[0]) * 1024))


def _align(counts: Sequence[int], common: int, **options: Any) -> dict[str, Any]:
    names = [f"client {i}" for i in range(len(counts))]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        credentials = make_credentials(names, Path(folder))
        processes, pipes, port = {}, {}, 0
        for me in (len(names) - 1, *range(len(names) - 1)):
            pipes[me], there = context.Pipe()
            arguments = (me, names, counts, common, options, credentials[names[me]], port, there)
            processes[me] = context.Process(target=_client, args=arguments)
            processes[me].start()
            there.close()
            port = pipes[me].recv() or port
        try:
            found = [pipes[me].recv() for me in range(len(names))]
        except EOFError:
            raise RuntimeError("a client failed: see its traceback above") from None
        for process in processes.values():
            process.join()
    return {
        "method": options["matching"],
        "seconds": max(each[0] for each in found),
        "cpu_seconds": sum(each[1] for each in found),
        "leader_cpu_seconds": found[-1][1],
        "bytes": sum(each[2] for each in found),
        "largest_memory": max(each[3] for each in found),
    }


def _spu(python: str, counts: Sequence[int], common: int) -> list[dict[str, Any]]:
    """What SPU takes for the same ids, reading and writing CSV included; its own process says so."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for client, count in enumerate(counts):
            Path(folder, f"{client}.csv").write_text("id\n" + "\n".join(make_ids(client, count, common)) + "\n")
        for method in _SPU:
            command = [python, str(_SPU_PROGRAM), method, folder, str(common)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"SPU_PYTHON = {python!r} failed with {method}: {done.stderr[-2000:]}")
            rows.append({"method": f"spu {method}", **json.loads(done.stdout.splitlines()[-1])})
    return rows


def measure(
    clients: int = 2,
    ids: int = 100_000,
    member_ids: int = 0,
    overlap: float = 0.5,
    matching: str = "ot",
    pad_to: int = 0,
) -> dict[str, Any]:
    """Time, processor seconds of all clients, bytes (all that clients have sent, the leader's passing on too),
    memory."""
    require_integer("clients", clients, 2, 16)
    require_integer("ids", ids, 1)
    require_integer("member_ids", member_ids, 0)
    require_real("overlap", overlap, 0.0, 1.0)
    require_choice("matching", matching, (*MATCHINGS, "all"))
    counts = [member_ids or ids] * (clients - 1) + [ids]
    common = round(min(counts) * overlap)
    methods = MATCHINGS if matching == "all" else (matching,)
    rows = [_align(counts, common, matching=method, pad_to=pad_to or None) for method in methods]
    spu = os.environ.get("SPU_PYTHON")
    if spu and clients == 2:
        rows += _spu(spu, counts, common)
    return {"clients": clients, "ids": counts, "pad_to": pad_to or None, "matched": common, "methods": rows}


def table(found: dict[str, Any]) -> Table:
    """A line a method."""
    lists = " · ".join(f"{count:,}" for count in found["ids"])
    view = Table(title=f"private alignment of {lists} ids over loopback, {found['matched']:,} common")
    for name in ("method", "CPU s", "wall s", "MB", "MB of memory"):
        view.add_column(name, justify="left" if name == "method" else "right")
    for row in found["methods"]:
        moved = f"{row['bytes'] / 1e6:,.1f}" if row["bytes"] else "–"
        memory = f"{row['largest_memory'] / 1e6:,.0f}"
        view.add_row(row["method"], f"{row['cpu_seconds']:.2f}", f"{row['seconds']:.2f}", moved, memory)
    return view


main = benchmark(
    measure,
    table,
    ids="of the label client",
    member_ids="of each other client (0: as many)",
    overlap="part of the shortest list that all have",
    matching=Option("how ids are matched", (*MATCHINGS, "all")),
    pad_to="pad the lists to N ids (0: not)",
)

if __name__ == "__main__":
    main()
