"""Commands of benchmarks: options come from signatures, JSON holds what a table shows."""

import importlib
import json

import pytest

from bench import noise

COMMANDS = ("defaults", "epoch_shuffle", "gl_step", "input_checks", "noise", "primitives", "reading")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_benchmark_explains_its_options(name, capsys):
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"bench.{name}").main(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "--json" in shown and f"bench.{name}" in shown


def test_json_holds_the_machine_and_what_was_found(capsys):
    noise.main(["--samples", "30000", "--repeat", "1", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["found"].keys() == {"samples", "filtered"} and min(told["found"].values()) > 0
    assert "load before the run" in told["machine"]
    noise.main(["--samples", "30000", "--repeat", "1"])
    assert "grid Gaussian samples" in capsys.readouterr().out


def test_a_wrong_option_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        noise.main(["--samples", "10"])
    assert "samples = 10" in capsys.readouterr().err
