"""Results on disk, one small JSON file a cell, so that an interrupted sweep continues where it stopped."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accel.files import write_text
from bench.evaluation.cells import Cell
from bench.evaluation.sources import DataOptions

__all__ = ["ResultCache"]


class ResultCache:
    """Files are named by ``Cell.key``; they are written whole or not at all. ``carried``: results of an earlier report
    whose files are not on this machine, with what the report says about them; they live as long as this object."""

    def __init__(self, folder: str | Path, data: DataOptions) -> None:
        self.folder, self.data = Path(folder), data
        self.carried: dict[Cell, dict[str, Any]] = {}

    def _path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.key(self.data)[:40]}.json"

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """The kept result, or None."""
        path = self._path(cell)
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))["result"]
        return self.carried[cell]["result"] if cell in self.carried else None

    def put(self, cell: Cell, result: dict[str, Any]) -> None:
        """Keep a result, with the cell beside it for people who look."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self._path(cell), json.dumps({"cell": asdict(cell), "result": result}))

    def about(self, cell: Cell) -> dict[str, Any]:
        """What a report says about a result beside its figures: its key, and the parts of it."""
        if cell in self.carried and not self._path(cell).exists():
            return {name: self.carried[cell][name] for name in ("key", "settings", "files")}
        files = self.data.identity(cell.data, cell.pretraining)
        return {"key": cell.key(self.data), "settings": cell.settings(), "files": files}
