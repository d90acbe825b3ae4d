"""Every protocol × task × hidden × weights × order × class weights, through the parser of the command line and
federation.toml.

What is accepted trains on threads and in the twin, and both agree. What is refused says so in one sentence, the same in
both places, when the file is read: before rows are matched, and long before anything is uploaded.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocols.federation.read import parse
from protocols.federation.template import federation_text
from protocols.methods import g_bmf, g_shuff
from protocols.plan.gl_plan import plan_layer_run
from protocols.plan.run_plan import Plan, plan_run
from protocols.run.options import parse_options
from protocols.state.shuffled_rows import ShuffledRows
from tests.protocols import gl_runs
from tests.protocols.conftest import lora_federation, small_federation
from tests.protocols.secure_runs import noise_of_the_servers, released, run_secure, weight_bound
from tests.protocols.server.test_secret_order import drawn_order
from tests.protocols.step.agreement import twin_and_bound
from vfl.federation import Federation
from vfl.twins import train_g_bmf, train_gl_bmf

PROTOCOLS, TASKS = ("g_bmf", "g_shuff", "gl_bmf"), ("classification", "binary", "regression")
CLASSES = {"classification": 3, "binary": 2, "regression": 1}
WEIGHTS = {"classification": (1.0, 2.0, 0.5), "binary": (1.0, 3.0), "regression": (1.0, 3.0)}
OTHERS = tuple(itertools.product(("", "5"), ("open", "secret"), ("fixed", "secret"), (False, True)))
ROWS, WIDTHS = 96, (3, 2)


def exists(protocol: str, task: str, hidden: str, weights: str, order: str, weighted: bool) -> bool:
    """What is built, as docs/python-api.md says."""
    if weighted and task == "regression":
        return False
    plain = task == "classification" and not weighted
    if protocol == "gl_bmf":
        return plain and not hidden and order == "fixed"
    if order == "secret" and (protocol == "g_shuff" or hidden):
        return False
    return plain or not hidden or (weights == "open" and not weighted)


def words(protocol: str, task: str, hidden: str, weights: str, order: str, weighted: bool) -> list[str]:
    """One batch, so that any order of it is the twin's, except with a secret order, which is read from the servers'
    disks."""
    size = ROWS // 3 if order == "secret" else ROWS
    found = {"task": task, "hidden": hidden, "weights": weights, "order": order, "epochs": 2, "batch-size": size}
    found |= {"learning-rate": 0.5, "epsilon": 8, "delta": 1e-3, "row-rule": "clip", "row-bound": 1}
    found |= {"accounting": "any-order"} if protocol == "g_shuff" else {}
    found |= {"class-weights": ",".join(map(str, WEIGHTS[task]))} if weighted else {}
    return [f"--{name}={value}" for name, value in found.items()]


def in_federation(protocol: str, task: str, hidden: str, weights: str, order: str, weighted: bool) -> str:
    """federation.toml of the same run."""
    clients = [("bank", WIDTHS[0], ""), ("card", WIDTHS[1], "127.0.0.1:7101")]
    target = (0.0, 1.0) if task == "regression" else None
    text = federation_text("grid", [("127.0.0.1", 7000 + i) for i in range(3)], clients, CLASSES[task], 0.2, target)
    more = {"weights": weights, "order": order}
    more |= {"task": task} if task != "regression" else {}
    given = "".join(f'{name} = "{value}"\n' for name, value in more.items())
    given += f"class_weights = {list(WEIGHTS[task])}\n" if weighted else ""
    text = text.replace('protocol = "g_bmf"', f'{given}protocol = "{protocol}"')
    return text.replace("hidden = []", f"hidden = [{hidden}]")


def require_agreement(plan: Plan, federation: Federation, directory: Path) -> None:
    """The released layers are the twin's, given the servers' noise and the order that was drawn."""
    result = run_secure(
        plan, federation, directory, g_shuff.servers if plan.protocol == "g_shuff" else g_bmf.servers, every=2
    )
    noise = noise_of_the_servers(plan, directory)
    if plan.secret_order:
        twin = train_g_bmf(federation, plan.training, noise=noise, order=drawn_order(plan, federation, directory))
        largest = max(1.0, *plan.training.class_weights, 0.0)
        assert np.abs(released(result)[0] - twin.model.layers[0]).max() <= largest * weight_bound(plan)
        return
    layers, gaps = twin_and_bound(plan, federation, noise)
    for layer, ours, gap in zip(layers, released(result), gaps, strict=True):
        assert np.linalg.norm(ours - layer) <= gap


def require_joint_agreement(training: Any, directory: Path) -> None:
    federation = lora_federation(ROWS, gl_runs.WIDTHS, gl_runs.BLOCKS, 3, local_learning_rate=0.1)
    plan = plan_layer_run(federation, training)
    result = gl_runs.run_secure(plan, federation, directory)
    noise = noise_of_the_servers(plan, directory)
    twin = train_gl_bmf(federation, plan.training, noise=noise)
    assert gl_runs.difference(result, twin) <= gl_runs.parameter_bound(plan, federation, noise)


def refusal(capsys: pytest.CaptureFixture[str], protocol: str, arguments: list[str], classes: int) -> str | None:
    """The sentence of the command, from its parser or its plan; None if it would run."""
    try:
        training = parse_options(protocol, None, arguments).training
        if protocol == "gl_bmf":
            plan_layer_run(lora_federation(ROWS, gl_runs.WIDTHS, gl_runs.BLOCKS, 3), training)
        else:
            plan_run(protocol, small_federation(ROWS, WIDTHS, classes), training)
    except SystemExit as left:
        return str(left).partition(": ")[2]
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_combination_trains_or_is_refused_when_it_is_read(protocol, task, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ShuffledRows, "discard", lambda self: None)  # the drawn order can be read after the run
    seen = set()
    for number, (hidden, weights, order, weighted) in enumerate(OTHERS):
        chosen = (protocol, task, hidden, weights, order, weighted)
        sentence, text = refusal(capsys, protocol, words(*chosen), CLASSES[task]), in_federation(*chosen)
        wanted = exists(protocol, task, hidden, weights, order, weighted)
        assert (sentence is None) == wanted, (chosen, sentence)
        seen.add(wanted)
        if sentence is not None:
            assert re.match(r"(task|class_weights|hidden|order|gradients) = .+: must be .+", sentence), sentence
            with pytest.raises(ValueError) as error:
                parse(text, "federation.toml", pinned=False)
            assert str(error.value) == f"federation.toml: [run] {sentence}"
            continue
        assert parse(text, "federation.toml", pinned=False).run.training.task == task
        training = parse_options(protocol, None, words(*chosen)).training
        if protocol == "gl_bmf":
            require_joint_agreement(training, tmp_path / str(number))
        else:
            federation = small_federation(ROWS, WIDTHS, CLASSES[task])
            require_agreement(plan_run(protocol, federation, training), federation, tmp_path / str(number))
    assert seen == (
        {True, False} if (protocol, task) not in (("gl_bmf", "binary"), ("gl_bmf", "regression")) else {False}
    )
