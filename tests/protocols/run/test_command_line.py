"""The commands as a user meets them: options, refusals, estimate, JSON, and what they import."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from functools import partial

import pytest

from protocols.methods import g_shuff
from protocols.plan.run_plan import plan_run
from protocols.run import predict
from protocols.run.curves import Timeline, curve_title, draw_curves
from protocols.run.data import make_federation
from protocols.run.launch import main, main_in_the_clear
from protocols.run.options import RunOptions, parse_options
from protocols.run.report import estimate
from protocols.state.model_file import read_model
from tests.protocols.secure_runs import run_secure, small_training
from vfl.data.sets import EMBEDDED_TABLES, load_data
from vfl.defaults import table_row_bound
from vfl.dp import DeltaWarning
from vfl.dp.claim import NO_CLAIM
from vfl.methods import FACTS
from vfl.training import TrainingConfig
from vfl.twins import train_ldp_g


def test_the_default_job_does_not_import_torch():
    program = (
        "import sys; from protocols.run.data import make_federation; from protocols.run.options import parse_options\n"
        "import protocols.methods.g_bmf; make_federation(parse_options('g_bmf', None, []))\n"
        "print([name for name in ('torch', 'torchvision', 'opacus', 'matplotlib') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.parametrize("method", FACTS)
def test_every_method_has_its_command(method, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [method, "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module(f"protocols.{method}", run_name="__main__")
    assert left.value.code == 0 and capsys.readouterr().out.startswith(f"usage: python -m protocols.{method}")


def test_options_survive_being_written_to_config_json():
    options = parse_options("g_bmf", None, ["--epsilon", "2", "--clients", "3", "--setting", "2", "--bands", "7"])
    assert options.training.momentum == 0.9 and options.training.bands == 7
    again = RunOptions.from_dict(json.loads(json.dumps(options.to_dict())))
    assert again == options


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--epsilon", "0"], "epsilon = 0.0: must be a finite number in (0, 100]"),
        (["--delta", "1"], "delta = 1.0: must be a finite number in (0, 1)"),
        (["--momentum", "1"], "momentum = 1.0: must be"),
        (["--resume", "nowhere"], "no config.json there, so no run to continue"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(capsys, words, sentence):
    with pytest.raises(SystemExit):
        parse_options("g_bmf", None, words)
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--batch-size", "5000"], "batch_size = 5000: must be an integer from 1 to 1438"),
        (["--clients", "99"], "num_clients = 99: must be an integer from 1 to"),
        (["--learning-rate", "1e9"], "learning_rate = 1000000000.0: must be small enough"),
        (["--clip-norm", "1e-7"], "clip_norm = 1e-07: must be at least"),
        (["--row-bound", "-1"], "row_bound"),
    ],
)
def test_what_does_not_fit_the_data_is_refused_in_a_sentence_and_leaves_nothing(tmp_path, words, sentence):
    with pytest.raises(SystemExit) as caught:
        main("g_bmf", None, [*words, "--out", str(tmp_path)])
    assert str(caught.value).startswith("g_bmf: ") and sentence in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_estimate_is_what_a_run_costs(federation, tmp_path, capsys):
    plan = plan_run("g_shuff", federation, small_training(epochs=2, accounting="proven", delta=1e-3))
    assert plan.secret_order
    result = run_secure(plan, federation, tmp_path, g_shuff.servers)
    found = estimate(plan)
    phases = [ledger.phases for ledger in result.ledgers]
    assert found["bytes"] == sum(p.bytes_sent for own in phases for p in own.values())
    assert found["rounds"] == sum(p.rounds for p in phases[0].values())
    main("g_bmf", None, ["--estimate", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["rounds_per_step"] == 17 and printed["claim"]["epsilon"] == pytest.approx(3.0)


@pytest.mark.parametrize("protocol", ["g_bmf", "g_shuff", "gl_bmf"])
def test_a_whole_run_leaves_its_files(tmp_path, capsys, protocol):
    words = ["--epochs", "1", "--parties", "threads", "--out", str(tmp_path), "--json", "--plot"]
    words += ["--twin"] if protocol == "g_bmf" else []
    words += ["--accounting", "any-order"] if protocol == "g_shuff" else []
    if protocol == "gl_bmf":
        main("gl_bmf", None, [*words, "--rank", "2"])
    else:
        main(protocol, None, words)
    report = json.loads(capsys.readouterr().out)
    (run,) = tmp_path.iterdir()
    assert {file.name for file in run.iterdir()} >= {
        "config.json", "model.npz", "claim.txt", "ledger.json", "report.json", "costs.png", "curves.png", "run.log",
    }  # fmt: skip
    assert not [*run.rglob("noise.key")]  # whoever has the directory could repeat the noise
    if protocol == "g_bmf":
        assert abs(report["test_accuracy"] - report["twin_accuracy"]) <= 0.01
    names = [release["name"] for release in report["releases"]]
    assert names.count("global model") == 2  # open weights: the servers have it
    # one bit on the uploads; in every step of gl_bmf one for each client, beside sums and layers
    assert len(names) == (5 if protocol != "gl_bmf" else 2 + 1 + 5 * 11)
    assert "differentially private" in (run / "claim.txt").read_text()
    log = (run / "run.log").read_text()
    assert f"{protocol} begun: 11 steps, 1408 rows, batches of 128, 2 clients" in log
    assert "training: 11 of 11\n" in log and "finished in " in log
    assert "released 11 times: noised gradient sums, 650 numbers, to all servers" in log
    if protocol == "gl_bmf":
        assert "released 11 times: layer gradient of client 1" in log
        for client in ("client-1", "client-2"):
            assert (run / client / "layers.npz").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("protocol", ["g_bmf", "gl_bmf"])
def test_whatever_a_run_with_a_twin_shows_begins_with_no_claim(tmp_path, capsys, protocol):
    """Its process sees the servers' noise. A run without one claims what it did."""
    command = partial(main, protocol, None)
    words = ["--epochs", "1", "--parties", "threads", "--out", str(tmp_path), "--checkpoint-every", "5", "--twin"]
    outputs = []
    for more in ([], ["--json"]):
        command([*words, *more, *([f"--resume={next(tmp_path.iterdir())}"] if more else [])])
        outputs.append(capsys.readouterr().out)
        command([*words, *more, "--estimate"])
        outputs.append(capsys.readouterr().out)
        (directory,) = tmp_path.iterdir()
        if protocol == "g_bmf":
            predict.main(None, ["--run", str(directory), "--clear", *more])
            outputs.append(capsys.readouterr().out)
    assert not [*directory.rglob("noise.key")]
    half = len(outputs) // 2
    begins = [*outputs[:half], *(next(iter(json.loads(text).values())) for text in outputs[half:])]
    begins += [(directory / "claim.txt").read_text(), read_model(directory / "model.npz").claim]
    begins += [next(iter(json.loads((directory / "report.json").read_text()).values()))]
    ledger = json.loads((directory / "ledger.json").read_text())
    begins += [release["claim"] for release in ledger["releases"] if release["name"] == "global model"]
    assert len(begins) >= 8 and [text for text in begins if not text.startswith(NO_CLAIM)] == []
    assert f"claim: {NO_CLAIM}" in (directory / "run.log").read_text()


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_method_of_one_process_claims_nothing(capsys, monkeypatch, more):
    monkeypatch.setattr(sys, "argv", ["ldp", "--epochs", "1", *more])
    main_in_the_clear("ldp", None, train_ldp_g)
    shown = capsys.readouterr().out
    assert (next(iter(json.loads(shown).values())) if more else shown).startswith(NO_CLAIM)


def test_curves_follow_the_reports(tmp_path):
    """Bytes are of all servers, rates are between reports, and nothing of the computation itself is needed."""
    timeline = Timeline()
    for done in (1, 2, 3):
        for server in (2, 1, 0):
            timeline.listen(server, {"phase": "training", "done": done, "total": 3, "bytes": 10 * done + server})
            timeline.listen(server, {"phase": "upload", "done": 7, "total": 9})
    timeline.seconds = [0.0, 0.5, 0.6]
    assert timeline.steps == [1, 2, 3] and timeline.bytes == [33, 63, 93]
    steps, rates = timeline.rates()
    assert steps.tolist() == [2, 3] and rates == pytest.approx([2.0, 10.0])
    options = RunOptions("g_bmf", TrainingConfig(epochs=1, schedule="cosine"))
    plan = plan_run("g_bmf", make_federation(options), options.training)
    for points in (timeline, Timeline()):  # a resumed run may have nothing left to train
        file = tmp_path / f"{len(points.steps)}.png"
        assert draw_curves(plan, points, file) and file.read_bytes().startswith(b"\x89PNG")


def test_g_shuff_says_that_the_papers_epsilon_is_not_proven():
    options = RunOptions("g_shuff", TrainingConfig(accounting="paper"))
    paragraph = plan_run("g_shuff", make_federation(options), options.training).claim.paragraph()
    assert "NOT a proven bound" in paragraph


UNPROVEN = "ε = 3 as if Poisson-sampled, not proven for shuffled batches"


def test_the_proven_epsilon_is_wherever_the_other_is(tmp_path, capsys, monkeypatch):
    """G-Shuff: the final table, the estimate, the curves, the log and the files."""
    monkeypatch.setenv("COLUMNS", "300")
    words = ["--epochs", "1", "--parties", "threads", "--out", str(tmp_path), "--accounting", "paper"]
    main("g_shuff", None, ["--epochs", "1", "--accounting", "paper", "--estimate"])
    main("g_shuff", None, words)
    printed = capsys.readouterr().out
    (run,) = tmp_path.iterdir()
    report = json.loads((run / "report.json").read_text())
    proven = f"proven ε = {report['claim']['proven_epsilon']:.4g}, δ = 1e-05"
    assert report["claim"]["proven_epsilon"] > 1.3 * report["claim"]["epsilon"]
    options = RunOptions("g_shuff", TrainingConfig(epochs=1, accounting="paper"))
    title = curve_title(plan_run("g_shuff", make_federation(options), options.training))
    assert printed.count(proven) >= 4 and printed.count(UNPROVEN) >= 4  # two tables, two paragraphs
    for text in (report["privacy"], title, *((run / name).read_text() for name in ("run.log", "claim.txt"))):
        assert proven in text and UNPROVEN in text
    for text in (printed, title, (run / "run.log").read_text()):
        assert text.count("ε = 3") == text.count(UNPROVEN)  # never alone


@pytest.mark.parametrize("protocol", ["g_bmf", "g_shuff", "gl_bmf", "ldp"])
def test_a_delta_that_is_too_large_is_warned_of(capsys, monkeypatch, protocol):
    words = ["--delta", "0.001", "--epochs", "1"]
    with pytest.warns(DeltaWarning, match=r"delta = 0.001 .* n = 14\d\d .* choose delta = 1e-05 or less"):
        if protocol == "ldp":
            monkeypatch.setattr(sys, "argv", ["ldp", *words])
            main_in_the_clear("ldp", None, train_ldp_g)
        elif protocol == "gl_bmf":
            main("gl_bmf", None, [*words, "--estimate", "--rank", "2"])
        else:
            main(protocol, None, [*words, "--estimate"])
    assert "WARNING: delta = 0.001" in capsys.readouterr().out


def test_tables_have_defaults_of_their_own():
    """Those of images would shrink every row to one norm; what is given holds."""
    for name, size in EMBEDDED_TABLES.items():
        data = load_data(name)
        assert (data.num_samples, sum(part.shape[1] for part in data.train)) == size
    options = parse_options("g_bmf", None, ["--data", "breast_cancer"])
    assert (options.row_rule, options.row_bound) == ("clip", table_row_bound(30))
    assert (
        options.training.batch_size == 79 and options.training.epochs == 20 and options.training.learning_rate == 0.55
    )
    assert options.training.average == "fifth" and options.training.task == "binary"
    options = parse_options("g_bmf", None, ["--data", "diabetes"])
    assert (options.row_rule, options.row_bound, options.training.task) == ("clip", table_row_bound(10), "regression")
    assert options.training.learning_rate == 0.048 and options.training.average == "fifth"
    for words in (
        ["--learning-rate", "1"],
        ["--weights", "secret"],
        ["--average", "none"],
        ["--patience", "3", "--public-fraction", "0.1"],
    ):
        assert parse_options("g_bmf", None, ["--data", "breast_cancer", *words]).training.average == "none"
    assert parse_options("plain", None, ["--data", "breast_cancer"]).training.average == "none"
    given = ["--data", "breast_cancer", "--row-rule", "normalise", "--epochs", "3", "--learning-rate", "2"]
    options = parse_options("g_bmf", None, given)
    assert (options.row_rule, options.row_bound, options.training.epochs) == ("normalise", 1.0, 3)
    for words in ([], ["--data", "digits"]):
        options = parse_options("g_bmf", None, words)
        assert (options.row_rule, options.row_bound, options.training) == (
            "normalise", 1.0, TrainingConfig(weights=options.training.weights)
        )  # fmt: skip
