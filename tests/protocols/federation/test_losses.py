"""[run] task in federation.toml: two classes are one logit, a regression has a range, and what does not fit is
refused."""

from __future__ import annotations

from typing import Any

import pytest

from protocols.federation.public_plan import plan_for
from protocols.federation.read import agreed_values, parse
from protocols.federation.template import federation_text

CLIENTS = [("bank", 4, ""), ("card", 3, "127.0.0.1:7100")]


def read(classes: int = 2, **run: str):
    text = federation_text("pilot", [(f"10.0.0.{i}", 7000) for i in range(3)], CLIENTS, classes)
    lines = [
        line
        for line in text.splitlines()
        if line.split(" = ")[0] not in {*run, *(["classes"] if "task" in run and "regression" in run["task"] else [])}
    ]
    at = lines.index("[run]") + 1
    lines[at:at] = [f"{name} = {value}" for name, value in run.items()]
    return parse("\n".join(lines), "f.toml", pinned=False)


def test_two_classes_are_one_logit_where_it_can_be():
    assert read().run.training.task == "binary" and plan_for(read(), 500).layer_shapes == [(8, 1)]
    assert read(task='"classification"').run.training.task == "classification"
    assert read(3).run.training.task == "classification"
    assert read(hidden="[4]").run.training.task == "classification"
    assert read(protocol='"gl_bmf"').run.training.task == "classification"
    assert read(protocol='"g_shuff"').run.training.task == "binary"


def test_a_regression_has_a_range_and_no_classes():
    config = read(task='"regression"', target_range="[0, 250.5]")
    assert config.run.classes == () and config.run.target_range == (0.0, 250.5)
    plan = plan_for(config, 500)
    assert plan.layer_shapes == [(8, 1)] and plan.label_bits == 14
    other = read(task='"regression"', target_range="[0, 250]")
    assert agreed_values(config)["[run] target_range"] != agreed_values(other)["[run] target_range"]
    rate = plan_for(read(), 500).training.learning_rate
    assert plan.training.learning_rate == pytest.approx(rate / 10, rel=0.1)


def test_class_weights_are_part_of_the_plan():
    config = read(class_weights="[1, 4.5]")
    assert config.run.training.class_weights == (1.0, 4.5)
    assert plan_for(config, 500).fingerprint != plan_for(read(), 500).fingerprint


REFUSED: dict[str, Any] = {
    r"\[run\] target_range = None: must be .lowest, highest.": {"task": '"regression"'},
    r"\[run\] target_range = 1.0: must be a finite number in": {"task": '"regression"', "target_range": "[2, 1]"},
    r"\[run\] target_range = .0, 1.: must be absent with classes": {"target_range": "[0, 1]"},
    r"\[run\] task = 'ranking'": {"task": '"ranking"'},
    r"\[run\] class_weights = .1.0,.: must be 2, one for each class": {"class_weights": "[1]"},
    r"\[run\] class_weights = 3: must be a list of numbers": {"class_weights": "3"},
    r"\[run\] class_weights = 0.0: must be": {"class_weights": "[0, 1]"},
    r"\[run\] task = 'binary': must be classification: there are 3 classes": {"classes": 3, "task": '"binary"'},
    r"class_weights = .*: must be empty in a regression": {
        "task": '"regression"',
        "target_range": "[0, 1]",
        "class_weights": "[1, 2]",
    },
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_does_not_fit_is_refused_in_a_sentence(sentence):
    with pytest.raises(ValueError, match=sentence):
        read(**REFUSED[sentence])


def test_classes_of_a_regression_are_refused():
    text = federation_text("pilot", [(f"10.0.0.{i}", 7000) for i in range(3)], CLIENTS, 2)
    text = text.replace("[run]\n", '[run]\ntask = "regression"\ntarget_range = [0, 1]\n')
    with pytest.raises(ValueError, match="absent in a regression, whose label is a number; give target_range"):
        parse(text, "f.toml", pinned=False)
