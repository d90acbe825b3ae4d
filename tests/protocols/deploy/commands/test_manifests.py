"""The examples in deploy/ are what their own tools accept, and start commands that exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from protocols.deploy.cli import make_parser

DEPLOY = Path(__file__).resolve().parents[4] / "deploy"


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def test_the_manifest_has_the_form_that_kubernetes_asks_for() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in documents():
        validate.validate(document, "1.31", strict=True)
    broken = documents()[1]
    broken["spec"]["replica"] = 3
    with pytest.raises(Exception, match="replica"):
        validate.validate(broken, "1.31", strict=True)


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
