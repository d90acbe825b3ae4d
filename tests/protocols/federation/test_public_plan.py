"""The plan that every participant makes from federation.toml alone is the plan that the data would give."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel.errors import InvalidArgument
from protocols.federation.public_plan import held_out_rows, local_update, log_claim, plan_for, training_for
from protocols.federation.read import FederationConfig, parse
from protocols.federation.template import federation_text
from protocols.log import Log
from protocols.plan.gl_plan import plan_layer_run
from vfl.data.sets import VerticalData
from vfl.defaults import training_defaults
from vfl.dp import DeltaWarning
from vfl.federation import Federation, build_federation

CLIENTS = [("bank", 4, ""), ("card", 3, "127.0.0.1:7101")]
ROWS = 300


def configured(*lines: str) -> FederationConfig:
    """The template with these lines of [run] instead of its own, or beside them."""
    text = federation_text("pilot", [("127.0.0.1", 7000 + i) for i in range(3)], CLIENTS, 3)
    for line in ('protocol = "gl_bmf"', "epochs = 3", "batch_size = 50", "learning_rate = 0.5", *lines):
        text, count = re.subn(rf"(?m)^{line.split()[0]} = .*$", line, text)
        text = text if count else text.replace("hidden = []", f"{line}\nhidden = []")
    return parse(text, pinned=False)


def federation_for(config: FederationConfig) -> Federation:
    """The same clients with rows, as a run on one machine builds them."""
    random, layers = np.random.default_rng(3), config.run.layers
    assert layers is not None
    columns = tuple(random.normal(size=(ROWS, width)) for _, width, _ in CLIENTS)
    data = VerticalData(
        name="rows",
        classes=3,
        train=columns,
        train_labels=np.arange(ROWS) % 3,
        test=tuple(part[:10] for part in columns),
        test_labels=np.arange(10) % 3,
        are_embeddings=True,
    )
    found = build_federation(
        data,
        row_bound=config.run.row_bound,
        row_rule=config.run.row_rule,
        lora=True,
        rank=layers.rank,
        lora_alpha=layers.lora_alpha,
        update=local_update(config),
    )
    found.clients = [replace(client, name=name) for client, (name, _, _) in zip(found.clients, CLIENTS, strict=True)]
    return found


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("rank = 2", "lora_alpha = 4.0", "local_learning_rate = 0.3", "momentum = 0.5"),
        ('local_update = "estimated"', "rank = 3", "weight_decay = 0.999"),
        ('gradients = "explicit"', "rank = 1", "row_bound = 0.5"),
        ('row_rule = "clip"', 'factorisation = "identity"', 'schedule = "cosine"'),
    ],
    ids=lambda lines: " ".join(lines) or "defaults",
)
def test_the_plan_from_the_file_is_the_plan_from_the_rows(lines: tuple[str, ...]) -> None:
    config = configured(*lines)
    federation = federation_for(config)
    local, public = plan_layer_run(federation, config.run.training), plan_for(config, ROWS)
    assert public.public_parameters() == local.public_parameters() and public.fingerprint == local.fingerprint
    stated = replace(
        local.claim, public=(*local.claim.public[: -len(federation.public_inputs)], *public.claim.public[-2:])
    )
    assert public.claim == stated  # but for who says that scaling and local models are public
    assert public.noise == replace(local.noise, claim=public.noise.claim) and public.noise.claim == local.noise.claim
    assert (
        public.releases.keys()
        == local.releases.keys()
        == {
            "global model",
            "noised gradient sums",
            "layer gradient of bank",
            "layer gradient of card",
            "fault in the upload of card",
            "fault in a step of bank",
            "fault in a step of card",
        }
    )
    covers = "labels only" if 'local_update = "estimated"' in lines else "features and labels"
    assert public.claim.covers == covers and covers in public.claim.paragraph()


def test_a_deployment_logs_what_is_proven_and_warns(tmp_path):
    config = configured('protocol = "g_shuff"', 'accounting = "paper"', "delta = 0.01")
    with pytest.warns(DeltaWarning):
        claim = plan_for(config, ROWS).claim
    log_claim(Log("bank", tmp_path / "log"), claim)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["level"] for line in lines] == ["info", "warning", "warning"]
    assert lines[0]["claim"].startswith("proven ε = ") and "not proven for shuffled batches" in lines[1]["claim"]
    assert "n = 300" in lines[2]["reason"] and "choose delta = 0.0001 or less" in lines[2]["reason"]


def test_held_out_rows_take_no_part_and_what_is_open_follows_from_the_others():
    config = configured(
        'protocol = "g_bmf"', "held_out = 0.2", 'epochs = "auto"', 'batch_size = "auto"', "epsilon = 1.0"
    )
    plan = plan_for(config, ROWS)
    assert held_out_rows(config, ROWS) == 60 and plan.schedule.num_samples == 240
    expected = training_defaults(240, 1.0)
    assert (plan.training.batch_size, plan.training.epochs) == (expected["batch_size"], expected["epochs"])
    assert plan.training.learning_rate == 0.5  # stated
    layers = plan_for(configured("held_out = 0.2"), ROWS)
    assert layers.schedule.num_samples <= 240
    stated = training_for(configured("batch_size = 24", 'epochs = "auto"'), ROWS)
    steps = expected["epochs"] * (ROWS // expected["batch_size"])
    assert abs(stated.steps(ROWS).num_steps - steps) < ROWS // 24 + 40  # about as many steps in smaller batches


def test_an_average_of_open_weights_is_part_of_the_plan() -> None:
    plain, averaged = (
        plan_for(configured('protocol = "g_bmf"', *lines), ROWS) for lines in ((), ('average = "exponential"',))
    )
    assert averaged.training.average == "exponential" and averaged.fingerprint != plain.fingerprint
    assert averaged.claim == plain.claim
    with pytest.raises(ValueError, match="average = 'fifth': must be 'none' with secret weights"):
        plan_for(configured('protocol = "g_bmf"', 'average = "fifth"', 'weights = "secret"'), ROWS)


@st.composite
def sizes(draw: Any) -> tuple[int, int, dict[str, str]]:
    """Up to 10^9 rows and 1,000 columns, and what somebody may have stated."""
    rows = round(10 ** draw(st.floats(0, 9)))
    given = {
        "epsilon = 3.0": f"epsilon = {draw(st.sampled_from([0.1, 3.0, 3.0, 10.0]))}",
        "clip_norm = 1.0": f"clip_norm = {draw(st.sampled_from([0.01, 1.0, 1.0, 30.0]))}",
        "momentum = 0.0": f"momentum = {draw(st.sampled_from([0.0, 0.0, 0.9]))}",
        "hidden = []": f"hidden = {draw(st.sampled_from(['[]', '[]', '[16]']))}",
    }
    return rows, draw(st.integers(2, 1000)), given


@pytest.mark.filterwarnings("ignore::vfl.dp.DeltaWarning")
@settings(max_examples=30, derandomize=True)
@example((50_000_000, 500, {}))
@example((100_000_000, 1000, {}))
@example((1_000_000_000, 1000, {}))
@given(sizes())
def test_what_is_automatic_fits_or_the_refusal_names_what_somebody_gave(drawn: tuple[int, int, dict[str, str]]) -> None:
    rows, width, stated = drawn
    clients = [("bank", width - 1, "host:1"), ("card", 1, "host:2")]
    text = federation_text("f", [("host", 9000 + number) for number in range(3)], clients, 2)
    for usual, line in ({"# maximum_rows = 100000000": "maximum_rows = 1000000000"} | stated).items():
        assert usual in text
        text = text.replace(usual, line)
    config = parse(text, pinned=False)
    try:
        plan = plan_for(config, rows)
    except InvalidArgument as refusal:
        assert str(refusal).split(" = ")[0] not in config.run.automatic, refusal
        assert rows > 10**8 or stated, refusal  # with the defaults, everything up to there has a plan
    else:
        assert plan.schedule.num_samples > 0.9 * rows - 5
