"""Run the cells that have no kept result: on the local cores (joblib) or on a Ray cluster, with the same functions.

Results are kept as soon as they arrive. A cell whose data is missing is no failure of the sweep: it is reported with
its sentence, and the others go on.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from accel.validate import require, require_choice, require_integer
from bench.evaluation.cache import ResultCache
from bench.evaluation.cells import Cell, group_cells, run_cells
from bench.evaluation.sources import DataOptions, NotThere

__all__ = ["ENGINES", "run_sweep"]

ENGINES = ("local", "ray")
Outcome = tuple[list[Cell], list[dict[str, Any]] | str]


def _job(cells: list[Cell], data: DataOptions, threads: int) -> Outcome:
    """In a worker: results, or the sentence that says what is missing."""
    from threadpoolctl import threadpool_limits

    try:
        with threadpool_limits(limits=threads):
            return cells, run_cells(cells, data)
    except NotThere as missing:
        return cells, str(missing)


def _until(jobs: Sequence[list[Cell]], minutes: float | None) -> Iterator[list[Cell]]:
    """The jobs, as long as there is time to start one."""
    end = None if minutes is None else time.monotonic() + 60 * minutes
    for job in jobs:
        if end is not None and time.monotonic() >= end:
            return
        yield job


def _local(jobs: Iterator[list[Cell]], data: DataOptions, workers: int) -> Iterator[Outcome]:
    threads = max(1, (os.cpu_count() or 1) // workers) if workers > 1 else 1
    if workers == 1:
        yield from (_job(cells, data, 1) for cells in jobs)
        return
    from joblib import Parallel, delayed

    parallel = Parallel(n_jobs=workers, return_as="generator_unordered")
    yield from parallel(delayed(_job)(cells, data, threads) for cells in jobs)


def _ray(jobs: Iterator[list[Cell]], data: DataOptions, workers: int) -> Iterator[Outcome]:
    require(
        importlib.util.find_spec("ray") is not None,
        "engine",
        "ray",
        "local while ray is not installed",
        "pip install 'ppvfl[ray]', or --engine local",
    )
    import ray

    if not ray.is_initialized():
        # RAY_ADDRESS names a cluster; without it one is started on this machine with ``workers`` cores
        ray.init(num_cpus=None if os.environ.get("RAY_ADDRESS") else workers, log_to_driver=False)
    remote = ray.remote(num_cpus=1)(_job)
    at_once = 2 * max(workers, int(ray.cluster_resources().get("CPU", 1)))
    waiting = [remote.remote(cells, data, 1) for cells in islice(jobs, at_once)]
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1)
        waiting += [remote.remote(cells, data, 1) for cells in islice(jobs, 1)]
        yield ray.get(done[0])


def run_sweep(
    cells: Sequence[Cell],
    data: DataOptions,
    cache: ResultCache,
    *,
    engine: str = "local",
    workers: int = 1,
    minutes: float | None = None,
    console: Console | None = None,
    on_result: Callable[[Cell, dict[str, Any] | str], None] = lambda cell, result: None,
) -> dict[Cell, dict[str, Any] | str]:
    """Every cell's result, or the sentence why there is none. Kept results are not run again; after ``minutes`` no
    further cell is started, and those left have no entry.
    """
    require_choice("engine", engine, ENGINES)
    require_integer("jobs", workers, 1)
    found: dict[Cell, dict[str, Any] | str] = {}
    todo = []
    for cell in dict.fromkeys(cells):
        kept = cache.get(cell)
        if kept is None:
            todo.append(cell)
        else:
            found[cell] = kept
    jobs = group_cells(todo)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("cells"), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=True),
    )  # fmt: skip
    console = console or Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task("training", total=len(todo))
        outcomes = (_ray if engine == "ray" else _local)(_until(jobs, minutes), data, workers) if jobs else iter(())
        for done, results in outcomes:
            for index, cell in enumerate(done):
                result = results if isinstance(results, str) else results[index]
                if not isinstance(result, str):
                    cache.put(cell, result)
                found[cell] = result
                on_result(cell, result)
            bar.update(shown, advance=len(done), description=done[-1].name)
    return found
