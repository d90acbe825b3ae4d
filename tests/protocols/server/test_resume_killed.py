"""kill -9 of a participant while a command runs: a sentence at the end, and ``--resume`` finishes the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocols.methods.registry import METHODS
from protocols.run import launch
from protocols.state.model_file import MODEL, read_model
from tests.protocols.server.killed import killed_client, killed_gl_server, killed_server

# A killed peer is noticed by its closed connection. The time-out only bounds the start of five interpreters.
COMMON = ["--timeout", "250", "--json"]


def use(patch: pytest.MonkeyPatch, protocol: str, **programs: Any) -> None:
    """Let servers or clients of ``protocol`` run another program."""
    patch.setitem(METHODS, protocol, replace(METHODS[protocol], **programs))


def run_command(protocol: str, words: list[str]) -> None:
    launch.main(protocol, None, words)


def interrupted(protocol: str, words: list[str], out: Path) -> tuple[Path, str]:
    """Run a command that is going to lose a participant; returns its folder and its last words."""
    with pytest.raises(SystemExit) as caught:
        run_command(protocol, [*words, "--out", str(out), *COMMON])
    (run,) = (path for path in out.iterdir() if path.is_dir())
    text = str(caught.value)
    assert text.startswith(f"{protocol}: ")
    assert "Traceback of" not in text
    assert text.endswith(f"continue with: python -m protocols.{protocol} --resume {run}")
    log = (run / "run.log").read_text()
    assert "failed: " in log and "killed by signal 9" in log
    return run, text


def resumed(protocol: str, run: Path, capsys, parties: str = "processes") -> dict[str, Any]:
    """The report of the resumed run. What is on disk does not depend on who reads it: threads are quicker."""
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "parties": parties}))
    capsys.readouterr()
    run_command(protocol, ["--resume", str(run), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert Path(report["directory"]) == run
    assert f"{protocol} resumed: " in (run / "run.log").read_text()
    return report


@pytest.mark.parametrize(("weights", "rounds"), [("open", 17), ("secret", 18)])
def test_a_killed_server_is_named_and_resume_finishes(tmp_path, monkeypatch, capsys, weights, rounds):
    use(monkeypatch, "g_bmf", servers=killed_server(1, 11, tmp_path / "killed"))
    words = ["--epochs", "3", "--checkpoint-every", "11", "--weights", weights]
    run, text = interrupted("g_bmf", words, tmp_path)
    assert "server-1 failed: PartyFailed: its process died (killed by signal 9)" in text
    assert "server-0 ended too: " in text and "server-2 ended too: " in text
    assert "server-1 closed the connection in " in text
    report = resumed("g_bmf", run, capsys)
    assert report["steps"] == 33 and 0.1 < report["test_accuracy"] <= 1.0
    training = next(row for row in report["phases"] if row["phase"] == "training")
    steps = training["rounds"] / rounds
    assert (
        steps == 22 if weights == "secret" else steps in range(23)
    )  # what lies before the checkpoint is not computed again


@pytest.mark.parametrize("clients", [0, 1])
def test_a_server_killed_while_it_releases_leaves_the_same_words_on_all_disks(tmp_path, monkeypatch, capsys, clients):
    """It dies with none, or one, of the two clients told: the resumed run sends what lies there, and goes on after
    it."""
    with monkeypatch.context() as patch:
        use(patch, "gl_bmf", servers=killed_gl_server(1, 9, clients, tmp_path / "killed"))
        run, _ = interrupted("gl_bmf", ["--epochs", "1", "--checkpoint-every", "1"], tmp_path)
    files = [run / f"server-{server}" / "opened-00000000.log" for server in range(3)]
    words = [file.read_bytes() for file in files]
    report = resumed("gl_bmf", run, capsys, "threads")
    for file, before in zip(files, words, strict=True):
        assert file.read_bytes().startswith(before)
    training = next(row for row in report["phases"] if row["phase"] == "training")
    assert training["rounds"] < 71  # the last of eleven steps, and no other
    released = [r["name"] for r in report["releases"]]
    assert released.count("layer gradient of client 1") == 2  # step 9 once more, and step 10


@pytest.mark.parametrize(
    ("protocol", "victim", "shares"),
    [
        ("g_bmf", "client 2", 1),  # its embeddings are there, its labels not
        ("gl_bmf", "client 1", 15),  # in step 7: blocks and factors of seven steps, blocks of the eighth
    ],
    ids=["g_bmf upload", "gl_bmf training"],
)
def test_a_killed_client_is_named_and_resume_finishes(tmp_path, monkeypatch, capsys, protocol, victim, shares):
    program = killed_client(protocol, victim, shares, tmp_path / "killed")
    with monkeypatch.context() as patch:
        use(patch, protocol, client=program)
        run, text = interrupted(protocol, ["--epochs", "1", "--checkpoint-every", "3"], tmp_path)
    assert f"client '{victim}' failed: PartyFailed: its process died (killed by signal 9)" in text
    for server in range(3):
        assert f"server-{server} ended too: " in text
    assert f"client '{victim}' closed the connection in 'input_from_client'" in text
    report = resumed(protocol, run, capsys, "threads")
    assert report["steps"] == 11
    training = next(row for row in report["phases"] if row["phase"] == "training")
    done = 7 if shares == 15 else 0  # every step of GL-BMF is on disk before its gradients are released
    assert training["rounds"] % (11 - done) == 0 and training["rounds"] < 71 * (11 - done)
    (layer,) = read_model(run / MODEL).layers
    assert np.isfinite(layer).all() and np.abs(layer).max() > 0


def test_a_client_killed_while_it_waits_for_the_model_gets_it_from_the_resumed_run(tmp_path, monkeypatch, capsys):
    """G-BMF trains without its clients, so the servers come to the end; the model they opened is sent again."""
    with monkeypatch.context() as patch:
        use(patch, "g_bmf", client=killed_client("g_bmf", "client 1", 99, tmp_path / "killed"))
        run, text = interrupted("g_bmf", ["--epochs", "1", "--checkpoint-every", "3"], tmp_path)
    assert text.startswith("g_bmf: client 'client 1' failed: PartyFailed: its process died (killed by signal 9)")
    report = resumed("g_bmf", run, capsys, "threads")
    assert "training" not in [row["phase"] for row in report["phases"]]
    assert [r["receiver"] for r in report["releases"]] == [
        *["all servers"] * 2,
        "client 'client 1'",
        "client 'client 2'",
    ]
    faults = [f"fault in the upload of client {number}" for number in (1, 2)]
    assert [release["name"] for release in report["releases"][:2]] == faults  # the rows came anew
