"""The label client compares predictions that it received with its own labels: figures on the terminal, a report as a file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from protocols.deploy.client.columns import OwnColumns
from protocols.inference.model_file import ReleasedModel
from vfl.evaluation import OUTSIDE, Evaluation, evaluate_classes, evaluate_numbers, write_report
from vfl.tasks import unscaled_targets

__all__ = ["evaluation_output", "print_evaluation"]


def evaluation_output(model: ReleasedModel) -> str:
    """What has to be opened for an evaluation: the same at all clients."""
    return "probabilities" if model.task != "regression" else "value"


def print_evaluation(
    own: OwnColumns,
    rows: np.ndarray,
    found: np.ndarray,
    model: ReleasedModel,
    file: Path,
    *,
    held_out: bool,
    as_json: bool,
) -> Evaluation:
    """``found[i]`` is the prediction for the client's own row ``rows[i]``. Writes ``file`` and prints figures, at the label client only."""
    if model.target_range is None:
        evaluation = evaluate_classes(own.label_numbers(rows, model.classes), found, model.classes)
    else:
        assert own.table.targets is not None
        evaluation = evaluate_numbers(own.table.targets[rows], unscaled_targets(found[:, 0], model.target_range))
    words = (
        "held-out rows, chosen before the training" if held_out else "labelled rows that were given for this evaluation"
    )
    write_report(file, evaluation, title="Evaluation of the released model", claim=model.claim, rows_in_words=words)
    if as_json:
        print(json.dumps({**evaluation.as_dict(), "report": str(file), "held_out": held_out}, indent=2))
        return evaluation
    view = Table(title=f"{evaluation.rows:,} {words}")
    view.add_column("")
    view.add_column("this model", justify="right")
    view.add_column("best constant answer", justify="right")
    for name, value in evaluation.metrics.items():
        chance = evaluation.chance.get(name)
        view.add_row(name, _shown(value), "" if chance is None else _shown(chance))
    console = Console()
    console.print(view)
    console.print(OUTSIDE.format(rows=evaluation.rows))
    console.print(f"[bold]{file}[/bold]: the report")
    return evaluation


def _shown(value: float) -> str:
    return "not defined" if math.isnan(value) else f"{value:.4f}"
