"""The examples in deploy/ are what their own tools accept, and start commands that exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import kubernetes_validate
import pytest
import yaml

from protocols.cli import make_parser

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def test_the_manifest_has_the_form_that_kubernetes_asks_for() -> None:
    for document in documents():
        kubernetes_validate.validate(document, "1.31", strict=True)
    broken = documents()[1]
    broken["spec"]["replica"] = 3
    with pytest.raises(Exception, match="replica"):
        kubernetes_validate.validate(broken, "1.31", strict=True)


def test_the_manifest_starts_one_server_with_its_state_on_a_volume() -> None:
    service, stateful, policy = documents()
    pod = stateful["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    arguments = make_parser("server").parse_args(container["args"])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    claims = [claim["metadata"]["name"] for claim in stateful["spec"]["volumeClaimTemplates"]]
    assert arguments.name == "server-0" and mounts[arguments.state] in claims and stateful["spec"]["replicas"] == 1
    assert not arguments.until_trained and arguments.status.startswith("127.0.0.1:")
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == policy["spec"]["podSelector"]["matchLabels"]
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"] and pod["securityContext"]["runAsNonRoot"]


def test_compose_has_a_health_check_on_the_page() -> None:
    server = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]
    assert "/healthz" in server["healthcheck"]["test"][-1] and server["restart"] == "on-failure"


# where operators put what is theirs, by the documentation or by habit; none of it may come into an image
PRIVATE = ("deploy/server-0/key.pem", "deploy/federation.toml", "pilot/server-0/key.pem", "server-0/state/noise.key",
           "bank.parquet", "accel/key.pem", "protocols/server-0/state/noise.key")  # fmt: skip


def instructions() -> list[tuple[str, list[str]]]:
    """The Dockerfile's instructions and their words."""
    text = re.sub(r"(?m)^#.*\n", "", (DEPLOY / "Dockerfile").read_text()).replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line.strip()]
    return [(name, words) for name, *words in lines]


def is_sent(file: str) -> bool:
    """Whether ``.dockerignore`` lets a file into the build: the last pattern that fits it, or a folder above it,
    decides."""
    path, sent = PurePosixPath(file), True
    for line in (DEPLOY.parent / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if pattern and not pattern.startswith("#"):
            anywhere = pattern.startswith("**/")
            above = [path, *path.parents][:-1]
            if any(
                place.match(pattern[3:]) if anywhere else str(place) == pattern or pattern == "*" for place in above
            ):
                sent = line.startswith("!")
    return sent


def test_the_image_is_made_of_named_packages_and_of_nothing_private() -> None:
    """``COPY . /src`` took the private keys of the documented layout into a layer of the image."""
    copied = [source for name, words in instructions() if name in ("COPY", "ADD") for source in words[:-1]]
    assert all((DEPLOY.parent / source).exists() and source not in (".", "./") for source in copied)
    taken = [file for file in PRIVATE if any(PurePosixPath(file).is_relative_to(source) for source in copied)]
    assert [file for file in taken if is_sent(file)] == [] and not any(map(is_sent, PRIVATE))
    settings = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in settings["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages < set(copied)
    sources = [file.relative_to(DEPLOY.parent) for name in packages for file in (DEPLOY.parent / name).rglob("*.py")]
    assert [str(file) for file in sources if not is_sent(str(file))] == []
    assert all(is_sent(source) for source in copied if (DEPLOY.parent / source).is_file())


def test_the_volume_of_a_container_belongs_to_its_user() -> None:
    """A new volume takes owner and mode from the image's directory: there was none, so root had it and the server
    ended."""
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]
    words = service["command"].split()
    state = words[words.index("--state") + 1]
    assert f"state:{state}" in service["volumes"]
    users = [place for place, (name, _) in enumerate(instructions()) if name == "USER"]
    made = [
        place
        for place, (_, words) in enumerate(instructions())
        if " ".join(words).find(f"install --directory --mode 0700 --owner ppvfl --group ppvfl {state}") >= 0
    ]
    assert made and users and made[0] < users[0] and instructions()[users[0]][1] == ["ppvfl"]
    assert (state_of := [words for name, words in instructions() if name == "VOLUME"]) == [[state]], state_of
    warm = [place for place, (name, words) in enumerate(instructions()) if (name, words) == ("RUN", ["ppvfl", "warm"])]
    assert warm and warm[0] > users[0]  # as the user whose cache it is


def complaints_of_systemd(unit: str, directory: Path) -> list[str]:
    """What ``systemd-analyze verify`` says about a unit whose program is there."""
    assert "/opt/ppvfl/bin/ppvfl " in unit
    file = directory / "ppvfl-server@.service"
    file.write_text(unit.replace("/opt/ppvfl/bin/ppvfl ", "/bin/true "))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert (done.returncode == 0) or lines, "a failure without a word"
    return lines


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_knows_every_line_of_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "ppvfl-server@.service").read_text()
    assert complaints_of_systemd(unit, tmp_path) == []
    misspelt = complaints_of_systemd(unit.replace("RestartSec=", "RestartSecs="), tmp_path)
    assert any("RestartSecs" in line for line in misspelt)


def test_the_unit_starts_a_server_that_stays_for_predictions() -> None:
    unit = (DEPLOY / "ppvfl-server@.service").read_text()
    (line,) = (line for line in unit.splitlines() if line.startswith("ExecStart="))
    words = line.partition("=")[2].replace("%i", "server-1").split()[1:]
    arguments = make_parser(words[0]).parse_args(words)
    assert arguments.name == "server-1" and not arguments.until_trained
    assert f"StateDirectory={arguments.state.removeprefix('/var/lib/').replace('server-1', '%i')}" in unit


def has_compose() -> bool:
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0


@pytest.mark.skipif(not has_compose(), reason="needs docker's compose plugin")
def test_compose_accepts_its_file() -> None:
    words = ["docker", "compose", "-f", str(DEPLOY / "compose.yaml"), "--profile", "tools", "config", "--quiet"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PPVFL_NAME": "server-0"})
    assert done.returncode == 0, done.stderr
