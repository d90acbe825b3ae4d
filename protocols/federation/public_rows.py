"""Labelled public rows, beside federation.toml: a run is measured on them after every epoch, at no cost in ε.

``ppvfl public-rows`` writes the file and puts its digest into federation.toml, so that everybody measures on the same
rows.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from accel.errors import InvalidArgument
from accel.files import read_arrays, write_arrays
from accel.validate import require
from protocols.federation.read import FederationConfig
from protocols.plan.public_rows import PublicRows

__all__ = ["FILE", "public_rows_of", "write_public_rows"]

FILE = "public-rows.npz"


def public_rows_of(config: FederationConfig) -> PublicRows | None:
    """The rows that ``[run] public_rows`` means, or None if it means none; refuses a file that is missing or another
    one."""
    run = config.run
    if not run.public_rows:
        return None
    file = Path(config.source).parent / FILE
    require(
        file.exists(), "[run] public_rows", f"without {file}", "with it", "copy it from who ran `ppvfl public-rows`"
    )
    try:
        arrays = read_arrays(file)
        found = PublicRows(arrays["words"], arrays["labels"])
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidArgument(f"{file} cannot be read ({type(error).__name__}): copy it again") from None
    require(
        found.digest == run.public_rows,
        f"digest of {file}",
        f"{found.digest[:16]}…",
        f"{run.public_rows[:16]}…, as [run] public_rows says",
        "take the file that belongs to this federation.toml",
    )
    return PublicRows(found.words, found.labels, run.patience)


def write_public_rows(config: FederationConfig, embeddings: np.ndarray, labels: np.ndarray) -> str:
    """Write the file beside federation.toml; its digest."""
    rows = PublicRows.of(embeddings, labels)
    write_arrays(Path(config.source).parent / FILE, {"words": rows.words, "labels": rows.labels})
    return rows.digest
