"""The evaluation: kept results continue, cells that were not run say so, one cell from data to report."""

import dataclasses
import hashlib
import importlib.util
import io
import json
import re
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from bench.evaluation import plots, texts
from bench.evaluation.cache import ResultCache
from bench.evaluation.cells import Cell, group_cells, run_cells
from bench.evaluation.compose import secure_cells, secure_view
from bench.evaluation.earlier import Taken, take_cells
from bench.evaluation.engine import run_sweep
from bench.evaluation.paper_tables import paper_accuracy, paper_table
from bench.evaluation.presets import LONG, PRESETS, preset_for
from bench.evaluation.report import Report, Section, rich_table, write_report
from bench.evaluation.sources import DataOptions
from bench.evaluation.tables import TABLES, Selection, layout, missing_view, view
from bench.paper import main

CELL = Cell("utility", "digits", "none", "ours", "g_bmf", 1, "", 8.0, 2, 0)
NOWHERE = DataOptions()


def cell_of(entry: dict[str, Any]) -> Cell:
    return Cell(**{field.name: entry[field.name] for field in dataclasses.fields(Cell)})


def at(epsilon, **changes):
    return dataclasses.replace(CELL, epsilon=epsilon, **changes)


def test_the_papers_figures():
    """Tables that print the same runs agree, and every list has a figure for each ε."""
    for number in TABLES:
        table = paper_table(number)
        for by_method in (m for p in table.figures.values() for m in p.values()):
            assert all(len(v) == len(table.epsilons) for v in by_method.values() if isinstance(v, list))
    long, local = (paper_table(n).figures["CIFAR-10"]["Pre-ImageNet"] for n in (7, 2))
    assert all(long[name] == local[name] for name in long if name != "Plain")
    assert paper_accuracy("cifar10", "cifar100", "gl_bmf", 2, 10.0) == 81.42
    assert paper_accuracy("cifar10", "imagenet", "fedbcd", 1, 4.0) == 70.43
    assert paper_accuracy("cifar10", "imagenet", "g_bmf", 1, 3.0) is None
    with pytest.raises(ValueError, match="table = '6'"):
        paper_table(6)


def test_a_sweep_continues(tmp_path):
    cache = ResultCache(tmp_path, NOWHERE)
    ran: list[Cell] = []
    first = run_sweep([at(1.0)], NOWHERE, cache, on_result=lambda cell, result: ran.append(cell))
    assert ran == [at(1.0)]
    # stopped at once: what was kept is there, nothing else is
    assert run_sweep([at(1.0), at(8.0)], NOWHERE, cache, minutes=0.0) == first
    both = run_sweep([at(1.0), at(8.0)], NOWHERE, cache, on_result=lambda cell, result: ran.append(cell))
    assert ran == [at(1.0), at(8.0)] and both[at(1.0)] == first[at(1.0)]
    # together or one by one, a cell gives the same figure
    alone, together = first[at(1.0)], run_cells([at(1.0), at(8.0)], NOWHERE)[0]
    assert isinstance(alone, dict) and together["accuracy"] == alone["accuracy"]
    assert not list(tmp_path.glob("*.part"))


def test_a_kept_result_belongs_to_its_configuration(monkeypatch, tmp_path):
    key = CELL.key(NOWHERE)
    assert key == dataclasses.replace(CELL).key(DataOptions(root="elsewhere"))
    assert len({key, at(1.0).key(NOWHERE), at(8.0, seed=1).key(NOWHERE), at(8.0, preset="paper").key(NOWHERE)}) == 4
    letters, files = at(8.0, data="ocr_letters"), DataOptions(str(tmp_path))
    absent = letters.key(files)
    (tmp_path / "ocr_letters.npz").write_bytes(b"other rows")
    assert letters.key(files) != absent and letters.key(NOWHERE) == absent
    changed = dataclasses.replace(PRESETS["ours"], projection=7)
    monkeypatch.setitem(PRESETS, "ours", changed)
    assert CELL.key(NOWHERE) != key


def test_runs_of_100_epochs_have_settings_of_their_own(monkeypatch):
    short, long = at(8.0), at(8.0, epochs=100)
    keys = short.key(NOWHERE), long.key(NOWHERE), at(8.0, epochs=100, preset="paper").key(NOWHERE)
    changed = LONG["ours"].training.with_(learning_rate=7.0)
    monkeypatch.setitem(LONG, "ours", dataclasses.replace(LONG["ours"], training=changed))
    assert preset_for("ours", 100).training.learning_rate == 7.0 != preset_for("ours", 20).training.learning_rate
    assert preset_for("paper", 100) is PRESETS["paper"]
    now = short.key(NOWHERE), long.key(NOWHERE), at(8.0, epochs=100, preset="paper").key(NOWHERE)
    assert [a == b for a, b in zip(keys, now, strict=True)] == [True, False, True]


def test_jobs_take_all_budgets_of_a_seed():
    cells = [at(1.0), at(1.0, seed=1), at(8.0), at(1.0, method="ldp_g"), at(8.0, method="ldp_g")]
    assert [len(job) for job in group_cells(cells)] == [2, 1, 1, 1]


def test_cells_without_noise_take_the_same_steps():
    """They tell what the adapters could give: same batches and clipping as G-BMF and GL-BMF, nothing added."""
    cells = [at(None), at(1.0), at(None, method="gl_bmf", variant="released")]
    assert [len(job) for job in group_cells(cells)] == [1, 1, 1]
    frozen, noised, adapted = (run_cells([cell], NOWHERE)[0] for cell in cells)
    assert frozen["steps"] == noised["steps"] == adapted["steps"]
    assert "noise_multiplier" not in frozen and frozen["clipped"] > 0 and adapted["clipped"] > 0
    assert min(frozen["accuracy"], adapted["accuracy"]) > noised["accuracy"]


def test_cells_that_were_not_run_say_so(tmp_path):
    lines = layout(1, Selection(seeds=2, data=("cifar10", "digits"), methods=("g_bmf",), epsilons=(1.0, 8.0)))
    own = [cell for line in lines for entry in line.entries for cell in entry.cells if cell.data == "digits"]
    results: dict[Cell, Any] = {own[0]: {"accuracy": 0.5}, own[1]: {"accuracy": 0.7}, own[2]: {"accuracy": 0.9}}
    missing = next(cell for line in lines for entry in line.entries for cell in entry.cells if cell.data == "cifar10")
    results[missing] = run_sweep([missing], NOWHERE, ResultCache(tmp_path, NOWHERE))[missing]
    shown = view(1, lines, results)
    texts = [row for kind, row in shown.rows if kind != "heading"]
    assert texts == [["G-BMF (Setting 1)", "ours, the paper's settings", "60.0 ± 14.1", "90.0 (1)"]]
    # lines without a figure stand in a list of their own, which a page folds away
    left = missing_view({1: lines}, results)
    digits = "digits (embedded)"
    assert left.folded and ["Table 1", digits, "G-BMF (Setting 1)", "our settings", "4", "4"] in [
        r for _, r in left.rows
    ]
    assert ["Table 1", digits, "G-BMF (Setting 1)", "the paper's settings", "1", "4"] in [r for _, r in left.rows]
    count = sum(len(entry.cells) for line in lines for entry in line.entries)
    assert left.title == f"Cells not run: {count - 3} of {count}, in {len(left.rows)} lines"
    # a data set of which nothing was run takes no line of the table: a note, with the reason
    titles = [row[0] for kind, row in shown.rows if kind == "heading"]
    why = "no weights for Pre-imagenet: pass --weights-imagenet FILE"
    assert titles == ["digits (embedded)"]
    assert shown.notes[:2] == [f"Not run: CIFAR-10, Pre-ImageNet ({why}).", "Not run: CIFAR-10, Pre-Cifar100."]
    nothing = view(1, [line for line in lines if line.data == "cifar10"], {})
    for table, words in ((shown, ("60.0 ± 14.1", "ε = 8", "digits (embedded)")), (nothing, ("Pre-Cifar100",))):
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(rich_table(table))
        printed = console.export_text()
        assert all(word in printed for word in words) and "…" not in printed
    assert "source" not in printed  # no columns where there are no rows
    alone = view(1, [line for line in lines if line.pretraining == "imagenet"], results)
    assert alone.rows == [] and alone.notes == [f"Not run: CIFAR-10, Pre-ImageNet ({why})."]


def test_methods_whose_epsilon_is_not_proven_are_marked():
    """Also when a kept result still says that it is proven."""
    for number, methods in ((1, ("g_shuff", "ldp_g", "ldp_gl", "g_bmf")), (3, ("split", "fedbcd", "admm", "ada_vfed"))):
        lines = layout(number, Selection(seeds=1, data=("digits",), methods=methods, epsilons=(1.0,)))
        kept = {"accuracy": 0.5, "proven": True, "covers": "features and labels", "claimed_epsilon": 1.0}
        results = {cell: kept for line in lines for entry in line.entries for cell in entry.cells}
        results = {c: r | ({"proven_epsilon": 9.9} if c.method == "g_shuff" else {}) for c, r in results.items()}
        shown = view(number, lines, results)
        labels = {row[0] for kind, row in shown.rows if kind != "heading"}
        marked = {label.endswith(" †") for label in labels if not label.startswith(("G-BMF", "LDP-G", "G-Shuff"))}
        assert marked == ({True} if number == 3 else set())
        assert {"G-Shuff", "G-Shuff †"} <= labels or number == 3  # in our settings the secret order is accounted for
        assert {"LDP-G", "LDP-GL †"} <= labels or number == 3
        assert not any("G-BMF" in note or "LDP-G:" in note for note in shown.notes)
        text = " ".join(shown.notes)
        if number == 1:
            assert "G-Shuff †: ε is as if Poisson-sampled, not proven for shuffled batches; proven is ε = 9.9" in text
            assert "LDP-GL †: ε is for a record's own released rows alone, not proven for the run" in text
        else:
            assert text.count("not proven for the run") == 4
    # three real servers run G-Shuff in our settings
    trained = secure_view(secure_cells("digits", "none"), {})
    assert {row[0] for _, row in trained.rows} >= {"G-Shuff (Setting 1)"} and not trained.notes


def test_the_command_writes_one_page(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    arguments = [
        "--data",
        "digits",
        "--epsilon",
        "1,8",
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--cache",
        str(tmp_path / "kept"),
    ]
    main([*arguments, "--only", "table1", "--methods", "plain,g_bmf,gl_bmf", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    assert "GL-BMF (Setting 2," in text and "estimated)" in text and "points at the same ε" in text
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<td data-under="ours, our settings">' in page  # what a phone shows below the name
    assert page.count("<svg") == 1 and not re.search(r'(src|href)="http|<script|<link', page)
    stored = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert len(stored["cells"]) == 2 * (1 + 6 * 2) and all(c["result"]["accuracy"] > 0.3 for c in stored["cells"])
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| G-BMF (Setting 1) | ours, our settings |" in page
    assert "GL-BMF estimated: the claim covers labels only, with ε = 2.15 where the column says 1." in page
    main([*arguments, "--only", "table4", "--methods", "g_shuff", "--out", str(tmp_path), "--no-run", "--json"])
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert tables[0]["rows"] == [] and tables[-1]["title"] == "Cells not run: 4 of 4, in 2 lines"


def test_a_report_is_renewed_from_its_json(tmp_path, capsys):
    """Results of another machine are taken if nothing about them has changed, and only then."""
    pytest.importorskip("matplotlib")
    words = [
        "--data",
        "digits",
        "--epsilon",
        "8",
        "--seeds",
        "2",
        "--jobs",
        "1",
        "--only",
        "table1",
        "--methods",
        "g_bmf",
    ]
    main([*words, "--preset", "ours", "--cache", str(tmp_path / "there"), "--out", str(tmp_path / "there")])
    file = tmp_path / "there" / "report.json"
    stored = json.loads(file.read_text(encoding="utf-8"))
    assert all(len(cell["key"]) == 64 for cell in stored["cells"])
    here = ResultCache(tmp_path / "here", NOWHERE)
    assert take_cells(file, here) == Taken(len(stored["cells"]), 0, 0)
    first = stored["cells"][0]
    assert here.get(cell_of(first)) == first["result"]
    # a cell of other settings, or a report from before its cells had keys
    first["key"] = "0" * 64
    del stored["cells"][1]["key"]
    file.write_text(json.dumps(stored), encoding="utf-8")
    capsys.readouterr()
    main(
        [
            *words,
            "--preset",
            "ours",
            "--cache",
            str(tmp_path / "new"),
            "--out",
            str(tmp_path),
            "--no-run",
            "--from",
            str(file),
        ]
    )
    assert f"{len(stored['cells']) - 2} cells taken, 2 left out" in " ".join(capsys.readouterr().err.split())
    assert len(list((tmp_path / "new").glob("*.json"))) == len(stored["cells"]) - 2


def test_cells_whose_files_are_not_here_are_carried_on(tmp_path, monkeypatch, capsys):
    """Weights that one machine had alone: the next report has their cells, with the key they had, but not beside other
    weights."""
    weights, others = tmp_path / "own.pth", tmp_path / "others.pth"
    weights.write_bytes(b"weights")
    others.write_bytes(b"other weights")
    there = ResultCache(tmp_path / "there", DataOptions(own_weights=str(weights)))
    cell, result = at(8.0, data="cifar10", pretraining="own", epochs=20), {"accuracy": 0.5, "seconds": 1.0}
    there.put(cell, result)
    entry = {**dataclasses.asdict(cell), **there.about(cell), "result": result}
    search = {
        "epsilons": [1.0],
        "trials": [{"option": "schedule", "value": "linear", "accuracies": [0.7], "kept": True}],
    }
    file = tmp_path / "report.json"
    file.write_text(json.dumps({"cells": [entry], "search": search}), encoding="utf-8")

    def taken(options: DataOptions) -> Taken:
        return take_cells(file, ResultCache(tmp_path / "here", options))

    assert taken(there.data) == Taken(1, 0, 0)
    assert taken(NOWHERE) == Taken(0, 1, 0)
    assert taken(DataOptions(own_weights=str(others))) == Taken(0, 0, 1)
    (tmp_path / "cifar100_public.npz").write_bytes(b"public images that the cell was not run with")
    assert taken(DataOptions(root=str(tmp_path))) == Taken(0, 0, 1)
    # through the command, twice: the second report is made from the first
    pytest.importorskip("matplotlib")
    words = [
        "--only",
        "table1",
        "--methods",
        "g_bmf",
        "--data",
        "cifar10",
        "--no-run",
        "--cache",
        str(tmp_path / "new"),
    ]
    for round_, source in enumerate([file, tmp_path / "0" / "report.json"]):
        main([*words, "--out", str(tmp_path / str(round_)), "--from", str(source)])
        said = capsys.readouterr()
        assert "0 cells taken, 1 carried on, as their files are not here" in " ".join(said.err.split())
        stored = json.loads((tmp_path / str(round_) / "report.json").read_text(encoding="utf-8"))
        (found,) = (each for each in stored["cells"] if isinstance(each["result"], dict))
        assert found == entry and "1 of them from a report whose files" in stored["facts"]["This command"]
        assert stored["search"] == search
        digest = hashlib.sha256(b"weights").hexdigest()  # the page says which file its lines are of
        assert sum(f"SHA-256 {digest[:16]}: " in note for view in stored["tables"] for note in view["notes"]) == 1
        assert any(view["title"].startswith("The search on the stand-in") for view in stored["tables"])
    assert texts.own_weights(["unknown"]).count("of a file whose digest was not kept") == 1
    # other settings: no longer what the tables speak of
    monkeypatch.setitem(PRESETS, "ours", dataclasses.replace(PRESETS["ours"], projection=7))
    assert taken(NOWHERE) == Taken(0, 0, 1)


def test_pictures_have_one_scale_and_their_reference_lines(monkeypatch):
    pytest.importorskip("matplotlib")
    lines = layout(1, Selection(seeds=1, data=("digits",), epsilons=(1.0, 8.0)))
    results: dict[Cell, Any] = {
        c: {"accuracy": 0.4 + 0.05 * c.setting} for l in lines for e in l.entries for c in e.cells
    }
    drawn: list[Any] = []
    original = plots._svg

    def keep(figure: Any) -> str:
        drawn.append(figure)
        return original(figure)

    monkeypatch.setattr(plots, "_svg", keep)
    assert plots.plot_accuracy(lines, results, 10) is not None
    axes = [axis for axis in drawn[0].axes if axis.get_visible()]
    assert len(axes) > 4 and {axis.get_ylim() for axis in axes} == {(0.0, 100.0)}
    for axis in axes:
        heights = [line.get_ydata()[0] for line in axis.lines if len(set(line.get_ydata())) == 1]
        assert 10.0 in heights and axis.get_xlabel() == "ε" and axis.get_ylabel()
        shown = [label for label in axis.get_xticklabels() + axis.get_yticklabels() if label.get_visible()]
        assert {"1", "8", "80"} <= {label.get_text() for label in shown}


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "plain", "variant": "full", "epsilon": None, "preset": "paper"},
        {"method": "g_bmf"},
        {"method": "gl_bmf", "variant": "released"},
    ],
)
def test_attack_cells(changes):
    """Figures of the attack agree with its curve; with noise at ε = 8 members look like others."""
    if changes.get("variant") == "full":
        pytest.importorskip("torch")
    (found,) = run_cells([dataclasses.replace(CELL, kind="attack", epochs=20, **changes)], NOWHERE)
    curve = np.array(found["roc"])
    assert np.all(np.diff(curve, axis=0) >= 0) and curve[0].tolist() == [0.0, 0.0]
    area = np.sum(np.diff(curve[:, 0]) * (curve[1:, 1] + curve[:-1, 1]) / 2) + (1 - curve[-1, 0])
    assert found["auc"] == pytest.approx(area, abs=0.01)
    assert abs(found["auc"] - 0.5) < 0.06  # two standard deviations of 629 members and as many others are 0.03


def test_settings_are_chosen_on_public_rows(tmp_path, capsys):
    """From public images alone; what is kept is the best mean, for our options and for the baselines' rates."""
    torch = pytest.importorskip("torch")
    from vfl.local.config import LocalModelConfig
    from vfl.local.models import build_local_model

    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (200, 32, 32, 3), dtype=np.uint8), np.arange(200) % 100
    np.savez(tmp_path / "cifar100_public.npz", x=images, y=labels)
    network = build_local_model(LocalModelConfig("resnet18", output_width=1000), (32, 16, 3)).network
    assert isinstance(network, torch.nn.Module)
    torch.save(network.state_dict(), tmp_path / "resnet18_imagenet.pth")
    arguments = ["--data-root", str(tmp_path), "--embedding-cache", str(tmp_path), "--out", str(tmp_path)]
    main(["choose", "--options", "ldp_projection,split", "--seeds", "1", "--epsilon", "8", *arguments])
    stored = json.loads((tmp_path / "choose.json").read_text(encoding="utf-8"))
    by_option = {
        name: [t for t in stored["trials"] if t["option"] == name] for name in ("ldp_projection", "split rates")
    }
    for trials in by_option.values():
        best = [t for t in trials if t["kept"]][-1]
        assert best["accuracies"] == max(t["accuracies"] for t in trials) and len(trials) >= 5
    kept = [t["value"] for t in by_option["ldp_projection"] if t["kept"]][-1]
    assert stored["best"]["ldp_projection"] == kept and len(stored["baseline_rates"]["split"]) == 2
    assert "split rates = 20, 0.002" in capsys.readouterr().out
    # another length is a search of its own, beside the first
    main(["choose", "--options", "ldp_rate", "--epochs", "2", "--seeds", "1", "--epsilon", "8", *arguments])
    names = {t["option"] for t in json.loads((tmp_path / "choose.json").read_text(encoding="utf-8"))["trials"]}
    assert names == {*by_option, "ldp_rate, 2 epochs"}


def test_one_pretraining_can_be_asked_for():
    """Our own weights are in Tables 1, 4 and 7; orders and noises are compared on one set of features only."""
    chosen = Selection(data=("cifar10",), pretrainings=("own",))
    for number in (1, 4, 7):
        lines = layout(number, chosen)
        assert lines and {line.pretraining for line in lines} == {"own"}
        assert not any("secret order" in line.variant or "joint noise" in line.variant for line in lines)
    assert not layout(3, chosen)
    everything = layout(1, Selection(data=("cifar10",)))
    assert {line.pretraining for line in everything if line.variant == "secret order"} == {"imagenet"}


def test_eight_blocks_are_a_data_set_of_their_own(tmp_path):
    """Its lines compare GL-BMF with G-BMF, and the paper's figures are not printed twice."""
    lines = [line for line in layout(1, Selection()) if line.data == "cifar10_images"]
    assert {line.method for line in lines} == {"plain", "g_bmf", "gl_bmf"}
    assert {line.source for line in lines} == {"paper", "ours"}
    assert not [line for line in layout(7, Selection()) if line.data == "cifar10_images"]
    images = at(8.0, data="cifar10_images", pretraining="imagenet")
    (tmp_path / "cifar10_strips_x4.npz").write_bytes(b"features")
    packed = dataclasses.replace(images, data="cifar10").key(DataOptions(str(tmp_path)))
    assert packed != dataclasses.replace(images, data="cifar10").key(NOWHERE)
    assert images.key(DataOptions(str(tmp_path))) == images.key(NOWHERE)  # does not look at features


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_a_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"engine = 'ray': must be local while ray is not installed.*ppvfl\[ray\]"):
        run_sweep([CELL], NOWHERE, ResultCache(tmp_path, NOWHERE), engine="ray")


def test_the_page_escapes_what_it_shows(tmp_path):
    paths = write_report(Report("a < b", ["`x<y`"], [("f", "&")], [Section("s", ["p"])], []), tmp_path)
    page = paths["html"].read_text(encoding="utf-8")
    assert "a &lt; b" in page and "<code>x&lt;y</code>" in page and "&amp;" in page


def test_wrong_options_are_refused(capsys):
    for arguments, sentence in (
        (["--only", "table6"], "'table6' is none of"),
        (["--epsilon", "one"], "'one': numbers"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert sentence in capsys.readouterr().err
