"""The comparison of GL-BMF with G-BMF: rates from one seed, figures from others, results kept."""

from typing import Any

import numpy as np
import pytest

import bench.gl_gain as module
from bench.gl_gain import Case, Gain, main
from vfl.data.sets import load_data
from vfl.local.config import LocalModelConfig


def test_a_gain_counts_beyond_two_standard_errors():
    rates = ((1.0, 0.0), (1.0, 1.0))
    clear = Gain(1.0, [50.0, 51.0, 52.0, 53.0], [52.0, 53.5, 53.5, 55.0], [60.0] * 4, rates)
    mean, error = clear.mean_and_error
    assert mean == pytest.approx(2.0) and error == pytest.approx(np.std([2, 2.5, 1.5, 2], ddof=1) / 2)
    assert clear.counts
    assert not Gain(1.0, [50.0, 51.0, 52.0, 53.0], [52.0, 50.0, 53.5, 53.0], [60.0] * 4, rates).counts


def narrow(options: Any, seed: int) -> Any:
    """Two outputs of an untrained MLP on the digits."""
    return load_data("digits", public_fraction=0.1, seed=seed), LocalModelConfig("mlp", output_width=2, seed=seed)


@pytest.fixture
def digits(monkeypatch):
    """One quick case at one ε."""
    pytest.importorskip("torch")
    monkeypatch.setattr(module, "CASES", {"digits": Case("digits, 2 outputs", narrow)})
    monkeypatch.setattr(module, "RATES", (8.0, 32.0))
    monkeypatch.setattr(module, "EPSILONS", (8.0,))


def test_trained_layers_pay_where_the_local_model_is_narrow(digits, tmp_path, monkeypatch, capsys):
    """The second run trains nothing, and says the same."""
    arguments = ["--keep", str(tmp_path / "kept.json"), "--seeds", "2"]
    main([*arguments, "--minutes", "0"])
    said = capsys.readouterr().out
    assert "digits: not complete" in said and "G-BMF" not in said  # and no table without rows
    main(arguments)
    printed = capsys.readouterr().out
    monkeypatch.setattr(module, "_federation", None)
    main(arguments)
    assert capsys.readouterr().out == printed
    runs = module.Runs(tmp_path / "kept.json", module.Options(None), 0.0)
    (found,) = module.gain(runs, "digits", "released", 2)
    assert found.counts and found.mean_and_error[0] > 5
    assert f"{found.mean_and_error[0]:+.1f}" in printed
    # rates are those of seed 0, which takes no part in the figures
    assert len(found.gl_bmf) == 2 and found.rates[0] == runs.best("digits", "g_bmf", "released")[0]


def test_layers_are_compared_on_the_same_seeds(digits, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "RATES", (8.0,))
    monkeypatch.setattr(module, "LOCAL_RATES", (50.0,))
    arguments = ["--keep", str(tmp_path / "kept.json"), "--seeds", "2"]
    main([*arguments, "--layers", "last", "--layers", "first", "--layers", "3"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "digits: lora_layers = '3': must be all, first, last" in printed
    runs = module.Runs(tmp_path / "kept.json", module.Options(None), 0.0)
    (last,), (first,) = (module.gain(runs, "digits", "released", 2, layers) for layers in ("last", "first"))
    assert last.g_bmf == first.g_bmf and last.gl_bmf != first.gl_bmf
    mean, error = first.against(last)
    assert mean == pytest.approx(np.mean(first.gl_bmf) - np.mean(last.gl_bmf))
    assert "against last" in printed and f"{mean:+.1f} ± {error:.1f}" in printed
    with pytest.raises(TimeoutError):  # all blocks are something else, which was not run
        module.gain(runs, "digits", "released", 2)


def test_what_is_not_there_is_said(tmp_path, capsys):
    main(["--keep", str(tmp_path / "kept.json"), "--only", "letters-8", "--only", "images"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "letters-8: data_root = None" in printed and "images: needs CIFAR-100 under --data-root" in printed


def test_one_seed_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--seeds", "1"])
    assert "a standard error needs at least two" in capsys.readouterr().err
