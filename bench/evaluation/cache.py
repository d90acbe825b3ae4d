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
    """Files are named by ``Cell.key``; they are written whole or not at all."""

    def __init__(self, folder: str | Path, data: DataOptions) -> None:
        self.folder, self.data = Path(folder), data

    def _path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.key(self.data)[:40]}.json"

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """The kept result, or None."""
        path = self._path(cell)
        if not path.exists():
            return None
        return json.loads(path.read_text(encoding="utf-8"))["result"]

    def put(self, cell: Cell, result: dict[str, Any]) -> None:
        """Keep a result, with the cell beside it for people who look."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self._path(cell), json.dumps({"cell": asdict(cell), "result": result}))
