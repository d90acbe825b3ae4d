"""No step of a run is ever sent with two values: whoever dies, whenever, and whatever was lost."""

from __future__ import annotations

import json
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel.files
import refmpc
from accel.files import read_arrays, write_arrays
from protocols.client.upload import ClientJob, client_program
from protocols.methods import g_bmf, g_shuff
from protocols.plan.run_plan import MODEL_RELEASE, plan_run
from protocols.run import launch
from protocols.server.training import ServerJob
from refmpc.core.errors import PartyFailed
from refmpc.core.party import Party
from tests.protocols.conftest import small_federation
from tests.protocols.gl_runs import make
from tests.protocols.gl_runs import run_secure as run_gl
from tests.protocols.secure_runs import released, small_training

STEPS = 3
STAGES = (
    f"checkpoint-{STEPS:08d}.npz is written",
    "'the release is written'",
    "released is written",
    "'the release is marked'",
    "'reveal_to_client'",
)
OPENINGS = ("open_to_client", "reveal_to_client")


class Crash(Exception):
    """What a test makes a server die of."""


class Watch:
    """Sees every file that servers write, and every message of theirs outside the computation of a step. ``kill`` names
    a point of one server at which it dies; ``sent`` holds every word that was ever sent to open something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.points: dict[int, list[str]] = defaultdict(list)
        self.kill: tuple[int, int] | None = None  # server, number of the point
        self.sent: dict[tuple[Any, ...], list[np.ndarray]] = defaultdict(list)
        self.too_early: list[str] = []  # what was sent before the disks were as they must be
        self._first: dict[int, int] = {}
        self._lock = threading.Lock()
        self._runs: dict[int, Path] = {}
        whole, exchange = accel.files.whole_file, Party._exchange

        @contextmanager
        def writing(file: Path, **options: Any) -> Any:
            server = int(file.parent.name[-1]) if file.parent.name.startswith("server-") else None
            if server is not None:
                self._runs[server] = file.parent.parent
            self._point(server, f"before {file.name} is written")
            with whole(file, **options) as handle:
                yield handle
            self._point(server, f"after {file.name} is written")

        def exchanging(
            party: Party, operation: str, sends: dict[Any, Any], receives: dict[Any, Any], *code: int
        ) -> None:
            if operation == "first step":
                self._first[party.id] = int(next(iter(sends.values()))[0][0])
            if party._phase in ("training", "upload", "verification", "norms", "set-up", "shuffle", "noise"):
                exchange(party, operation, sends, receives, *code)
                return
            self._point(party.id, f"before {operation!r}")
            self._note(party, operation, sends)
            exchange(party, operation, sends, receives, *code)
            self._point(party.id, f"after {operation!r}")

        monkeypatch.setattr(accel.files, "whole_file", writing)
        monkeypatch.setattr(Party, "_exchange", exchanging)

    def _point(self, server: int | None, name: str) -> None:
        if server is None:
            return
        with self._lock:
            self.points[server].append(name)
            now = server, len(self.points[server]) - 1
        if now == self.kill:
            raise Crash(name)

    def _note(self, party: Party, operation: str, sends: dict[Any, list[np.ndarray]]) -> None:
        if operation not in OPENINGS:
            return
        again = party._phase == "greeting"
        step = (self._first[party.id] - 1 if again else party.step) if operation == "open_to_client" else STEPS - 1
        self._check_disks(party, operation, step)
        for peer, parts in sends.items():
            for place, part in enumerate(parts):
                with self._lock:
                    self.sent[operation, party.id, peer, step, place].append(part.copy())

    def _check_disks(self, party: Party, operation: str, step: int) -> None:
        """Words: written by all three, marked by their sender. A shared value: marked by all three."""
        for server in range(3):
            own, marked = self._runs[party.id] / f"server-{server}", 0
            if (own / "released").exists():
                marked = accel.files.read_json(own / "released")
            good = (own / f"checkpoint-{step + 1:08d}.npz").exists()
            if operation == "open_to_client":
                good = good and (own / f"release-{step + 1:08d}.npz").exists()
            if server == party.id or operation != "open_to_client":
                good = good and marked >= step + 1
            if not good:
                self.too_early.append(f"{operation} of server {party.id}, step {step}: server {server} is not ready")

    def two_values(self) -> list[tuple[Any, ...]]:
        """What was sent with two different values."""
        return [key for key, found in self.sent.items() if any(not np.array_equal(found[0], more) for more in found)]


def run_g(plan, federation, directory, every: int = 0, servers=g_bmf.servers, **options):
    used = slice(0, plan.schedule.num_samples)
    clients = {}
    for c in federation.clients:
        one_hot = c.one_hot_rows(used, plan.classes) if c.is_label_client else None
        clients[c.name] = client_program, ClientJob(plan, c.embedding_rows(used), one_hot)
    jobs = [ServerJob(plan, directory / f"server-{i}", every) for i in range(3)]
    return refmpc.run(servers, jobs, clients=clients, releases=plan.releases, timeout=60, **options)


def runner(protocol: str) -> Callable[..., Any]:
    """A small run of a protocol that can be started in a directory as often as one likes."""
    if protocol == "gl_bmf":
        layers, layer_plan = make(epochs=1, momentum=0.5)
        return lambda directory, **options: run_gl(layer_plan, layers, directory, keep=True, **options)
    federation = small_federation(96, (5, 4), 4)
    plan = plan_run(protocol, federation, small_training(learning_rate=0.2))
    servers = {"g_bmf": g_bmf.servers, "g_shuff": g_shuff.servers}[protocol]
    every = 3 if protocol == "g_shuff" else 1
    return lambda directory, **options: run_g(plan, federation, directory, every, servers, **options)


def model_of(result: Any) -> np.ndarray:
    return np.concatenate([layer.ravel() for layer in released(result)])


@pytest.mark.parametrize("protocol", ["g_bmf", "g_shuff", "gl_bmf"])
def test_a_server_that_dies_anywhere_around_a_release_never_makes_two_values(tmp_path, monkeypatch, protocol):
    """Every point between computing, writing, confirming, marking and sending, at one server after the other."""
    run, watch = runner(protocol), Watch(monkeypatch)
    run(tmp_path / "whole")
    names = watch.points[0]
    written = next(i for i, name in enumerate(names) if "checkpoint-" in name or "release-" in name)
    points = range(written, len(names))
    assert {f"{when} {what}" for when in ("before", "after") for what in STAGES} <= {names[i] for i in points}
    for victim, point in enumerate(points):
        watch.points.clear()
        watch.sent.clear()
        directory, watch.kill = tmp_path / f"{point}", (victim % 3, point)
        with pytest.raises(PartyFailed, match="Crash"):
            run(directory)
        where, watch.kill = watch.points[victim % 3][-1], None
        model = model_of(run(directory))
        assert watch.two_values() == [] and watch.too_early == [], f"server {victim % 3} died {where}"
    assert (model_of(run(directory)) == model).all()  # a finished run sends the same again
    assert watch.two_values() == [] and watch.too_early == []


@pytest.mark.parametrize("protocol", ["g_bmf", "g_shuff", "gl_bmf"])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("lost", ["an old backup", "the last checkpoint", "everything", "the noise key"])
def test_a_finished_run_never_releases_a_second_model(tmp_path, monkeypatch, protocol, victim, lost):
    run, watch = runner(protocol), Watch(monkeypatch)
    own, backup = tmp_path / "run" / f"server-{victim}", tmp_path / "backup"
    if lost == "an old backup":
        monkeypatch.setattr(watch, "_point", _copies(watch, own, backup))
    first = model_of(run(tmp_path / "run"))
    if lost == "an old backup":
        shutil.rmtree(own)
        shutil.copytree(backup, own)
    elif lost == "the last checkpoint":
        sorted(own.glob("checkpoint-*.npz"))[-1].unlink()
    elif lost == "everything":
        shutil.rmtree(own)
    else:
        (own / "noise.key").unlink()
    kept = {file.name for i in range(3) if i != victim for file in (tmp_path / "run" / f"server-{i}").iterdir()}
    if lost == "the noise key":  # nothing is left to be computed with it
        assert (model_of(run(tmp_path / "run")) == first).all()
    else:
        with pytest.raises(PartyFailed, match=rf"server-{victim} .*released.*start a new run"):
            run(tmp_path / "run")
    assert watch.two_values() == []
    left = {file.name for i in range(3) if i != victim for file in (tmp_path / "run" / f"server-{i}").iterdir()}
    assert kept <= left  # the others have lost nothing by it: with the right backup the run goes on


def _copies(watch: Watch, own: Path, backup: Path) -> Callable[[int | None, str], None]:
    """A point that keeps a copy of a server's directory as it was before its last checkpoint."""
    last = f"before checkpoint-{STEPS:08d}.npz is written"

    def point(server: int | None, name: str) -> None:
        if server is not None and own.name == f"server-{server}" and name == last and not backup.exists():
            shutil.copytree(own, backup, ignore=shutil.ignore_patterns("*.part"))

    return point


@pytest.mark.parametrize("lost", ["everything", "the noise key"])
def test_a_server_without_its_noise_key_does_not_go_on_with_other_noise(tmp_path, monkeypatch, lost):
    """Nothing is released yet, but the noise of later steps must fit that of the earlier ones."""
    run = runner("g_bmf")
    with monkeypatch.context() as patch:
        dry = Watch(patch)
        run(tmp_path / "dry")
    watch = Watch(monkeypatch)
    watch.kill = 1, dry.points[1].index("after checkpoint-00000002.npz is written")
    with pytest.raises(PartyFailed, match="Crash"):
        run(tmp_path / "run")
    watch.kill = None
    if lost == "everything":
        shutil.rmtree(tmp_path / "run" / "server-2")
    else:
        (tmp_path / "run" / "server-2" / "noise.key").unlink()
    with pytest.raises(PartyFailed, match="server-2 has lost its noise key"):
        run(tmp_path / "run")


def test_a_server_that_died_before_it_had_a_noise_key_begins_with_the_others(tmp_path, monkeypatch):
    run, watch = runner("g_bmf"), Watch(monkeypatch)
    watch.kill = 1, 0
    with pytest.raises(PartyFailed, match="Crash: before begun.json is written"):
        run(tmp_path)
    watch.kill = None
    assert np.isfinite(model_of(run(tmp_path))).all()


# secret weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["g_bmf", "g_shuff", "gl_bmf"])
@pytest.mark.filterwarnings("ignore:insecure_")
def test_no_server_sees_anything_of_a_model_whose_weights_are_secret(tmp_path, monkeypatch, protocol):
    """After a finished run the third share on the two other disks is changed, so that it has another model: not a byte
    differs of what a server receives when the model is handed over, nor of what it gives back."""
    monkeypatch.setattr(
        "os.urandom", lambda count: bytes(count)
    )  # clients' seeds and noise keys: runs repeat to the byte
    views = {"insecure_seed": 3, "insecure_record": True}
    run = partial(runner(protocol), **views)
    run(tmp_path / "trained")
    whole = run(shutil.copytree(tmp_path / "trained", tmp_path / "whole"))
    for ledger in whole.ledgers:
        assert {r.receiver for r in ledger.releases if r.name == MODEL_RELEASE} == {
            "client 'client 1'",
            "client 'client 2'",
        }
    for server in range(3):
        other = shutil.copytree(tmp_path / "trained", tmp_path / f"other-{server}")
        for holder, place in (((server + 1) % 3, 1), ((server + 2) % 3, 0)):
            file = max((other / f"server-{holder}").glob("checkpoint-*.npz"))
            shares = read_arrays(file)
            shares["values-0"][place] += np.uint64(12345)
            write_arrays(file, shares)
        changed = run(other)
        assert not np.array_equal(model_of(changed), model_of(whole))
        assert changed.outputs == whole.outputs == [[]] * 3
        ours, theirs = whole.transcripts[server], changed.transcripts[server]
        assert [entry[:2] for entry in ours] == [entry[:2] for entry in theirs] and len(ours) > 3
        assert all(np.array_equal(a[2], b[2]) for a, b in zip(ours, theirs, strict=True))


# how the run was begun ---------------------------------------------------------------------------


def test_gl_bmf_begun_without_checkpoints_is_not_resumed_with_them(tmp_path, monkeypatch):
    federation, plan = make(epochs=1)
    watch = Watch(monkeypatch)
    run_gl(plan, federation, tmp_path)
    with pytest.raises(PartyFailed, match="begun without checkpoints"):
        run_gl(plan, federation, tmp_path, keep=True)
    assert watch.two_values() == []


@pytest.mark.parametrize("protocol", ["g_bmf", "g_shuff", "gl_bmf"])
def test_servers_refuse_another_plan_in_the_directory_of_a_run(tmp_path, protocol):
    for epsilon in (20.0, 0.5):
        if protocol == "gl_bmf":
            layers, layer_plan = make(epochs=1, epsilon=epsilon)
            start = lambda: run_gl(layer_plan, layers, tmp_path, keep=True)  # noqa: E731, B023
        else:
            federation = small_federation(96, (5, 4), 4)
            plan = plan_run(protocol, federation, small_training(learning_rate=0.2, epsilon=epsilon))
            servers = {"g_bmf": g_bmf.servers, "g_shuff": g_shuff.servers}[protocol]
            start = lambda: run_g(plan, federation, tmp_path, 0, servers)  # noqa: E731, B023
        if epsilon == 20.0:
            start()
        else:
            with pytest.raises(PartyFailed, match=r"another plan: epsilon was 20\.0 and is 0\.5"):
                start()


def test_resume_with_an_edited_configuration_is_refused(tmp_path, capsys):
    """ε = 20, edited to 0.5 after the run: the same model must not come with (0.5, 1e-5)."""
    words = ["--epochs", "1", "--parties", "threads", "--out", str(tmp_path), "--json", "--epsilon", "20"]
    launch.main("g_bmf", None, words)
    (run,) = tmp_path.iterdir()
    config = json.loads((run / "config.json").read_text())
    config["training"]["epsilon"] = 0.5
    (run / "config.json").write_text(json.dumps(config))
    before, log = (run / "report.json").read_bytes() if (run / "report.json").exists() else b"", run / "run.log"
    lines = log.read_text()
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"g_bmf: .*another plan: epsilon was 20\.0 and is 0\.5.*start a new run"):
        launch.main("g_bmf", None, ["--resume", str(run)])
    assert "0.5" not in capsys.readouterr().out
    assert log.read_text() == lines and (not before or (run / "report.json").read_bytes() == before)
    config["training"]["epsilon"] = 20.0
    (run / "config.json").write_text(json.dumps(config))
    launch.main("g_bmf", None, ["--resume", str(run), "--json"])
    assert json.loads(capsys.readouterr().out)["claim"]["epsilon"] == pytest.approx(20.0)
    for server in range(3):
        shutil.rmtree(run / f"server-{server}")
    with pytest.raises(SystemExit, match=r"holds a released model, but its servers' files are missing"):
        launch.main("g_bmf", None, ["--resume", str(run)])
