"""An option is declared once, and is then at every door: command, file and its template, estimators, table of the docs,
agreed hash."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from protocols.api import VerticalClassifier, VerticalRegressor
from protocols.federation.read import parse
from protocols.federation.template import federation_text
from protocols.run.options import parse_options
from protocols.settings import RunConfig, declared, settings_table
from vfl.methods import FACTS, SECURE
from vfl.settings import Setting
from vfl.training import TrainingConfig

CLIENTS = [("bank", 4, ""), ("card", 3, "127.0.0.1:7100")]
SERVERS = [("127.0.0.1", 7000 + i) for i in range(3)]


def test_an_option_that_is_declared_once_is_at_every_door():
    """In a process of its own: the field is added to the declaration alone, and everything else is imported after
    that."""
    program = """
        import dataclasses, inspect
        import protocols.settings as settings
        from vfl.settings import setting

        @dataclasses.dataclass(frozen=True)
        class More(settings.RunConfig):
            haste: float = setting(0.5, "how little care is taken", low=0.0, high=1.0, written="value")

        settings.RunConfig = settings.RunOptions = More
        from protocols.federation.read import agreed_values, parse
        from protocols.federation.template import federation_text
        from protocols.run.options import parse_options
        from ppvfl import VerticalClassifier

        assert parse_options("g_bmf", None, ["--haste", "0.25"]).haste == 0.25
        clients = [("a", 3, ""), ("b", 3, "127.0.0.1:7100")]
        text = federation_text("f", [("127.0.0.1", 7000 + i) for i in range(3)], clients, 2)
        assert "\\nhaste = 0.5" in text and "# how little care is taken" in text
        agreed = [agreed_values(parse(t, pinned=False)) for t in (text, text.replace("haste = 0.5", "haste = 0.7"))]
        assert [one["[run] haste"] for one in agreed] == [0.5, 0.7]
        try:
            parse(text.replace("haste = 0.5", "haste = 7"), pinned=False)
            raise SystemExit("accepted")
        except ValueError as error:
            assert "[run] haste = 7.0: must be a finite number in [0, 1]" in str(error)
        assert inspect.signature(VerticalClassifier).parameters["haste"].default == 0.5
        assert VerticalClassifier(haste=0.7).get_params()["haste"] == 0.7
        row = "| `haste` | all | number in [0, 1] | `0.5` | how little care is taken | all |"
        assert row in settings.settings_table()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def wrong_value(each: Setting) -> str | None:
    """A word of the command line that is beyond the declared range."""
    if each.choices:
        return "nothing-like-it"
    if each.kind in (int, float) and each.low > float("-inf"):
        return str(each.kind(each.low - (0 if each.open_low else 1)))
    return None


@pytest.mark.parametrize("each", declared(), ids=lambda each: each.name)
def test_a_value_beyond_its_range_is_refused_at_every_door(each, capsys):
    word = wrong_value(each)
    if word is None:
        pytest.skip("any value is in its range")
    if "command" in each.doors:
        method = next(name for name in SECURE if FACTS[name].takes(each.needs))
        with pytest.raises(SystemExit) as end:
            parse_options(method, None, [f"{each.flag}={word}"])
        assert end.value.code == 2 and each.name.split("_")[0] in capsys.readouterr().err
    if "file" in each.doors:
        value = [each.kind(word)] if each.several else each.kind(word)
        text = federation_text("f", SERVERS, CLIENTS, 3)
        lines = [line for line in text.splitlines() if not line.startswith(f"{each.name} =")]
        lines.insert(lines.index("[run]") + 1, f"{each.name} = {value!r}")
        with pytest.raises(ValueError, match=rf"\[run\] {each.name} = "):
            parse("\n".join(lines), pinned=False)
    if "api" in each.doors:
        value = [each.kind(word)] if each.several else each.kind(word)
        x, y = [[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]] * 8, [0, 1, 1] * 8
        with pytest.raises(ValueError, match=f"{each.name} = "):
            VerticalClassifier(**{each.name: value}).estimate(x, y)


@pytest.mark.parametrize("method", FACTS)
def test_an_option_that_means_nothing_to_a_method_is_refused_with_those_that_take_it(method, capsys):
    for each in declared("command"):
        if (
            FACTS[method].takes(each.needs)
            or each.kind is not str
            or not each.choices
            or each.name in ("order", "task", "weights")
        ):
            continue
        other = next(choice for choice in each.choices if choice != each.default)
        with pytest.raises(SystemExit):
            parse_options(method, None, [each.flag, other])
        assert f"{each.name} = {other!r}: must be" in capsys.readouterr().err


def test_defaults_are_the_same_at_every_door():
    """Where nothing is said, the file, the command and an estimator ask for the same training; estimators leave out no
    option."""
    x, y = [[float(i % 7), float(i % 5), 0.5] for i in range(120)], [i % 3 for i in range(120)]
    of_api = VerticalClassifier().estimate(x, y)
    assert of_api.epsilon == pytest.approx(3.0) and of_api.delta == 1e-5
    config = parse(federation_text("f", SERVERS, CLIENTS, 3), pinned=False)
    assert isinstance(config.run, RunConfig) and config.run.training == TrainingConfig(weights="open")
    for estimator, without in ((VerticalClassifier, set()), (VerticalRegressor, {"hidden"})):
        assert {each.name for each in declared("api")} - without <= set(estimator().get_params())


def test_two_classes_are_one_logit_at_every_door():
    assert parse_options("g_bmf", None, ["--data", "breast_cancer"]).training.task == "binary"
    assert parse_options("plain", None, ["--data", "breast_cancer"]).training.task == "binary"
    assert parse(federation_text("f", SERVERS, CLIENTS, 2), pinned=False).run.training.task == "binary"
    assert parse_options("gl_bmf", None, ["--data", "breast_cancer"]).training.task == "classification"
    assert parse_options("g_bmf", None, ["--data", "breast_cancer", "--hidden", "4"]).training.task == "classification"


def test_the_table_of_the_documentation_has_every_option():
    table = settings_table()
    for each in declared():
        assert (f"| `{each.name}` |" in table) == bool(each.doors)
