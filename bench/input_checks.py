"""What it costs to test an honest upload: ``python -m bench.input_checks --rows 100000 --columns 64``.

Three servers and two clients as processes, over mutual TLS on loopback. The same columns are shared again and again,
each time either tested by the servers or taken as they are; one run, in turns, after an upload of each kind that is not
counted. Time is from the moment at which clients may begin until the last server has rows and norms, with which a
training begins; CPU time is that of all five processes.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from rich.table import Table

import refmpc
from accel.validate import require_integer
from bench.harness import benchmark
from protocols.client.upload import ClientJob, share_columns
from protocols.plan.run_plan import Plan, PublicClient, PublicFederation, plan_run
from protocols.run.report import size_in_words
from protocols.server.intake import receive_rows
from refmpc import Client, Party
from vfl.defaults import table_row_bound
from vfl.training import TrainingConfig

__all__ = ["InputChecks", "measure"]

CLIENTS = ("bank", "card")


@dataclass(frozen=True)
class InputChecks:
    """Seconds, and seconds of CPU and bytes of all five, of an upload with the tests and without: medians of
    ``repeats``."""

    rows: int
    columns: int
    repeats: int
    seconds: float
    seconds_without: float
    cpu: float
    cpu_without: float
    bytes: int
    bytes_without: int


class Trusting(Plan):
    """The same plan, of servers that take what they get."""

    row_tests = ()


def trusting(plan: Plan) -> Trusting:
    """The plan without the tests."""
    return Trusting(**{each.name: getattr(plan, each.name) for each in fields(plan)})


async def take_in(party: Party, job: tuple[Plan, int]) -> list[tuple[float, float, int]]:
    """At a server, of each upload: seconds, seconds of CPU, and the bytes that this server sent for it."""
    plan, repeats = job
    found = []
    for number in range(2 * repeats + 2):
        sent, begun, used = party.ledger.total().bytes_sent, time.perf_counter(), time.process_time()
        for name in CLIENTS:
            party.send("go", name, [np.zeros(1, dtype=np.uint8)])
        await receive_rows(party, trusting(plan) if number % 2 else plan)
        taken = time.perf_counter() - begun, time.process_time() - used
        found.append((*taken, party.ledger.total().bytes_sent - sent))
    return found[2:]


def share(client: Client, job: tuple[ClientJob, int]) -> list[float]:
    """At a client: its columns, whenever all servers say so; gives the seconds of CPU of each upload."""
    columns, repeats = job
    found = []
    for _ in range(2 * repeats + 2):
        client.collect("go", {server: [np.empty(1, dtype=np.uint8)] for server in range(3)})
        used = time.process_time()
        share_columns(client, columns)
        found.append(time.process_time() - used)
    return found[2:]


def measure(rows: int = 100_000, columns: int = 64, repeats: int = 5, row_bound: float | None = None) -> InputChecks:
    """One run in processes; without a row bound, with that of tables."""
    bound = table_row_bound(columns) if row_bound is None else row_bound
    for name, value in (("rows", rows), ("columns", columns), ("repeats", repeats)):
        require_integer(name, value, 2 if name == "columns" else 1)
    widths = (columns // 2, columns - columns // 2)
    shapes = tuple(PublicClient(name, width) for name, width in zip(CLIENTS, widths, strict=True))
    training = TrainingConfig(epochs=1, batch_size=min(rows, 512), learning_rate=0.5, clip_norm=1.0, delta=1e-7)
    plan = plan_run("g_bmf", PublicFederation(shapes, rows, 2, bound, ()), training)
    assert plan.row_tests
    random, used = np.random.default_rng(1), plan.schedule.num_samples
    clients: dict[str, tuple[Any, Any]] = {}
    for name, width in zip(CLIENTS, widths, strict=True):
        values = random.normal(size=(used, width)).astype(np.float32)
        values /= np.float32(2**0.5 / bound) * np.linalg.norm(values, axis=1, keepdims=True)
        labels = plan.labels_to_share(random.integers(0, 2, used)) if name == CLIENTS[-1] else None
        clients[name] = share, (ClientJob(plan, values, labels), repeats)
    result = refmpc.run(
        take_in,
        [(plan, repeats)] * 3,
        parties="processes",
        tls=True,
        clients=clients,
        releases=plan.releases,
        timeout=300.0,
    )
    middle = []
    for kind in (0, 1):  # tested, and not
        servers = [own[kind::2] for own in result.outputs]
        seconds = [max(taken for taken, _, _ in each) for each in zip(*servers, strict=True)]
        every = [[cpu for _, cpu, _ in own] for own in servers] + [
            own[kind::2] for own in result.client_outputs.values()
        ]
        cpu = [sum(each) for each in zip(*every, strict=True)]
        sent = 16 * used * (plan.width + plan.outputs) + sum(own[0][2] for own in servers)
        middle.append((statistics.median(seconds), statistics.median(cpu), sent))
    return InputChecks(used, columns, repeats, *(number for pair in zip(*middle, strict=True) for number in pair))


def table(found: InputChecks) -> Table:
    """Both kinds of upload, and their ratio."""
    view = Table(
        "", "tested", "as they come", "ratio", title=f"upload of {found.rows:,} rows × {found.columns} columns"
    )
    for name, tested, plain in (
        ("seconds", found.seconds, found.seconds_without),
        ("seconds of CPU, all five", found.cpu, found.cpu_without),
    ):
        view.add_row(name, f"{tested:.2f}", f"{plain:.2f}", f"{tested / plain:.3f}")
    sizes = (size_in_words(found.bytes), size_in_words(found.bytes_without))
    view.add_row("bytes, all five", *sizes, f"{found.bytes / found.bytes_without:.3f}")
    return view


main = benchmark(
    measure,
    table,
    rows="of each client",
    columns="of both clients together",
    repeats="uploads of each kind; medians count",
    row_bound="of all clients together; without it 4·√columns, as for tables",
)

if __name__ == "__main__":
    main()
