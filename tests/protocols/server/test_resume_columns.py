"""A client that comes back with other rows is refused before anything is shared; one with the same rows is not."""

from __future__ import annotations

import stat
from dataclasses import replace

import numpy as np
import pytest

import refmpc
from protocols.client.gl_client import client_program as gl_program
from protocols.client.upload import ClientJob, client_program
from protocols.methods import g_bmf
from protocols.methods.gl_bmf import METHOD
from protocols.plan.run_plan import plan_run
from protocols.server.training import ServerJob
from tests.not_none import not_none
from tests.protocols.gl_runs import make
from tests.protocols.gl_runs import run_secure as run_gl
from tests.protocols.secure_runs import released, run_secure, small_training
from tests.protocols.server.crashes import run_until_crash

SHARED: list[str] = []


def watched(client, job):
    """A client program with a note of every array that it shares."""
    real = client.share

    def share(*arguments):
        SHARED.append(client.name)
        real(*arguments)

    client.share = share
    return (client_program if isinstance(job, ClientJob) else gl_program)(client, job)


def resume(plan, federation, directory, change=lambda name, job: job):
    used = slice(0, plan.schedule.num_samples)
    clients = {}
    for c in federation.clients:
        one_hot = c.one_hot_rows(used, plan.classes) if c.is_label_client else None
        clients[c.name] = watched, change(c.name, ClientJob(plan, c.embedding_rows(used), one_hot))
    jobs = [ServerJob(plan, directory / f"server-{i}", 2) for i in range(3)]
    SHARED.clear()
    return refmpc.run(g_bmf.servers, jobs, clients=clients, releases=plan.releases, timeout=60)


def one_value(name, job):
    rows = job.embeddings.copy()
    rows[7, 0] += 2.0**-13
    return replace(job, embeddings=rows) if name == "client 1" else job


def two_rows_swapped(name, job):
    order = np.arange(len(job.embeddings))
    order[[3, 4]] = 4, 3
    return replace(job, embeddings=job.embeddings[order]) if name == "client 1" else job


def one_label(name, job):
    return job if job.labels is None else replace(job, labels=np.roll(job.labels, 1, axis=0))


def less_than_the_grid(name, job):
    """Another machine's local model may differ in the last bits of a float; what counts is the fixed-point value."""
    cells = job.embeddings * 2.0**14
    off_the_edges = np.abs(cells - np.floor(cells) - 0.5) > 0.01
    return replace(job, embeddings=job.embeddings + 1e-9 * off_the_edges)


@pytest.mark.parametrize(
    ("change", "who"), [(one_value, "client 1"), (two_rows_swapped, "client 1"), (one_label, "client 2")]
)
def test_other_columns_are_refused_before_anything_is_shared(federation, tmp_path, monkeypatch, change, who):
    plan = plan_run("g_bmf", federation, small_training(epochs=2, learning_rate=0.2))
    run_until_crash(plan, federation, tmp_path, monkeypatch, 5)
    sentence = f"client '{who}' came back with different columns; restore that data .* or start a new run"
    with pytest.raises(refmpc.PartyFailed, match=sentence) as caught:
        resume(plan, federation, tmp_path, change)
    assert SHARED == []
    for peer in (0, 1, 2, "client 1", "client 2"):  # everybody says the same
        assert "came back with different columns" in caught.value.tracebacks[peer]
    result = resume(plan, federation, tmp_path, less_than_the_grid)  # and the refusal has spoilt nothing
    assert SHARED and np.isfinite(released(result)[0]).all()


def test_servers_that_kept_nothing_go_by_the_one_that_did(federation, tmp_path, monkeypatch):
    """Two servers died before they kept the tag: they must not keep the changed columns' tag either."""
    plan = plan_run("g_bmf", federation, small_training(epochs=2, learning_rate=0.2))
    run_until_crash(plan, federation, tmp_path, monkeypatch, 5)
    for server in (1, 2):
        file = tmp_path / f"server-{server}" / "commitment-00.npz"
        with np.load(file) as kept:
            salt = kept["salt"]
        np.savez(file, salt=salt)
    with pytest.raises(refmpc.PartyFailed, match="client 'client 1' came back with different columns"):
        resume(plan, federation, tmp_path, one_value)
    resume(plan, federation, tmp_path)


@pytest.mark.parametrize("part", ["embeddings", "blocks", "labels"])
def test_gl_bmf_refuses_other_columns_too(tmp_path, part):
    federation, plan = make(epochs=1)
    run_gl(plan, federation, tmp_path, keep=True)
    changed = federation.fresh()
    who = changed.clients[1 if part == "labels" else 0]
    if part == "embeddings":
        who.embeddings = who.embeddings + 2.0**-13
    elif part == "blocks":
        who.block_outputs = [x[::-1] for x in who.block_outputs]
    else:
        who.labels = (not_none(who.labels) + 1) % plan.classes
    jobs = {name: (watched, job) for name, job in METHOD.client_jobs(plan, changed, tmp_path).items()}
    SHARED.clear()
    with pytest.raises(refmpc.PartyFailed, match=f"client '{who.name}' came back with different columns"):
        run_gl(plan, federation, tmp_path, keep=True, clients=jobs)
    assert SHARED == []


def tags_of(directory) -> list[tuple[bytes, bytes]]:
    found = []
    for server in range(3):
        file = directory / f"server-{server}" / "commitment-00.npz"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        with np.load(file) as kept:
            found.append((kept["salt"].tobytes(), kept["tag"].tobytes()))
    return found


def test_a_tag_says_nothing_without_all_three_salts(federation, tmp_path):
    """Same columns, another run: another tag; so too if only one of the salts is another."""
    plan = plan_run("g_bmf", federation, small_training())
    run_secure(plan, federation, tmp_path / "a")
    first = tags_of(tmp_path / "a")
    assert len({salt for salt, _ in first}) == 3 and len({tag for _, tag in first}) == 1
    seen = {first[0][1]}
    for other in range(3):
        for server, (salt, _) in enumerate(first):
            path = tmp_path / f"b{other}" / f"server-{server}"
            path.mkdir(parents=True)
            if server != other:
                np.savez(path / "commitment-00.npz", salt=np.frombuffer(salt, dtype=np.uint8))
        run_secure(plan, federation, tmp_path / f"b{other}")
        directory = tmp_path / f"b{other}" / f"server-{other}" / "commitment-00.npz"
        with np.load(directory) as kept:
            seen.add(kept["tag"].tobytes())
    assert len(seen) == 4
