"""Cells of an earlier ``report.json``, so that a report can be renewed without training everything again.

Every cell of a report has its key. Those whose key is the present one go into the cache of results as if they had been
run here; those whose files are not on this machine are shown as the report has them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from accel.files import write_text
from accel.validate import require
from bench.evaluation.cache import ResultCache
from bench.evaluation.cells import Cell
from bench.evaluation.presets import PRESETS
from bench.evaluation.sources import ABSENT

__all__ = ["Taken", "take_cells", "take_search"]


@dataclass(frozen=True)
class Taken:
    """How many cells of a report: kept as if run here; carried on, their files not being here; left out, because code,
    settings or data are others by now, or because the report is older than its keys."""

    kept: int
    carried: int
    left: int


def take_cells(file: Path, cache: ResultCache) -> Taken:
    """Keep the cells of a ``report.json`` that are still what they were. Where a file behind a cell is not here
    (weights of our own, say), the cell is carried on as the report has it if settings, code and all files that are here
    are the same."""
    stored = json.loads(file.read_text(encoding="utf-8"))
    require("cells" in stored, "from", str(file), "a report.json of bench.paper, which has its cells")
    names = [field.name for field in fields(Cell)]
    kept = carried = left = 0
    for entry in stored["cells"]:
        cell = Cell(**{name: entry[name] for name in names})
        if not isinstance(entry["result"], dict) or cell.preset not in PRESETS:
            left += 1
        elif entry.get("key") == cell.key(cache.data):
            cache.put(cell, entry["result"])
            kept += 1
        elif entry.get("settings") == cell.settings() and _not_here(entry["files"], cell, cache):
            cache.carried[cell] = entry
            carried += 1
        else:
            left += 1
    return Taken(kept, carried, left)


def _not_here(files: Sequence[str], cell: Cell, cache: ResultCache) -> bool:
    """Whether a file of a stored cell is not on this machine, and all others are those it was run with."""
    here = cache.data.identity(cell.data, cell.pretraining)
    return ABSENT in here and all(now in (ABSENT, then) for now, then in zip(here, files, strict=True))


def take_search(file: Path, choice: Path) -> bool:
    """Write the search for our settings that a ``report.json`` holds to ``choice``, unless there is one; whether it was
    written."""
    search = json.loads(file.read_text(encoding="utf-8")).get("search")
    if not search or choice.exists():
        return False
    choice.parent.mkdir(parents=True, exist_ok=True)
    write_text(choice, json.dumps(search, indent=1))
    return True
