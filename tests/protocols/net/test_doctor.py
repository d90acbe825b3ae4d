"""ppvfl doctor: a sound federation, and planted misconfigurations, each of which is found and named."""

from __future__ import annotations

import contextlib
import datetime
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nacl.bindings
import pytest

from protocols.cli import main
from protocols.cli.doctor import examine
from protocols.federation.read import FederationConfig, load
from protocols.net import checks
from protocols.net.answerer import MAX_TRANSFER
from protocols.net.checks import PEER_CHECKS, Finding, check_own_files, check_peer
from protocols.net.credentials import load_credentials
from protocols.version import software_version
from refmpc.net.tls import LENGTH, MAX_MESSAGE, Credentials, parse, receive, secure, send
from tests.protocols.run.hosts.federations import answering, make_federation, moved, rekey


def failed(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.status == "failed"]


def test_nothing_is_wrong_with_a_sound_federation(tmp_path: Path):
    config = make_federation(tmp_path)
    with answering(config):
        findings = examine(config, "bank")
        as_server = examine(config, "server-1")
    assert {finding.status for finding in findings + as_server} == {"ok"}
    for server in ("server-0", "server-1", "server-2"):
        assert [f.check for f in findings if f.subject == server] == list(PEER_CHECKS)
    assert {f.subject for f in as_server} == {"server-0", "server-1", "server-2"}
    assert [f.check for f in as_server if f.subject == "server-1"] == [
        "privacy",
        "disk",
        "own certificate",
        "own certificate valid",
        "own key safe",
        "own key matches",
    ]


def test_doctor_says_what_epsilon_and_delta_will_mean(tmp_path: Path):
    config = make_federation(tmp_path)
    (found,) = [f for f in check_own_files(config, "bank") if f.check == "privacy"]
    assert found.status == "ok" and "ε = 3, δ = 1e-05, for fewer than 100,000 common rows" in found.found
    path = tmp_path / "federation.toml"
    path.write_text(path.read_text().replace('protocol = "g_bmf"', 'protocol = "g_shuff"'))
    (found,) = [f for f in check_own_files(load(path), "bank") if f.check == "privacy"]
    assert found.status == "ok"  # its secret order is accounted for
    path.write_text(path.read_text().replace('protocol = "g_shuff"', 'protocol = "g_shuff"\naccounting = "paper"'))
    (found,) = [f for f in check_own_files(load(path), "bank") if f.check == "privacy"]
    assert found.status == "warning" and "as if Poisson-sampled, not proven for shuffled batches" in found.found


def test_how_rows_will_be_matched_and_what_that_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_federation(tmp_path)

    def matching(config: FederationConfig) -> Finding:
        (found,) = [f for f in check_own_files(config, "bank") if f.check == "matching"]
        return found

    found = matching(config)
    assert (found.status, found.found) == (
        "ok",
        "ot, clients only; with 1,000,000 rows each about 102 MB and 3 CPU seconds in all",
    )
    older = replace(config, run=replace(config.run, matching="ecdh"))
    assert matching(older).found.startswith("ecdh, clients only; with 1,000,000 rows each about 108 MB and 180 CPU")
    monkeypatch.setattr(nacl.bindings, "has_crypto_core_ed25519", False)
    found = matching(config)
    assert found.status == "failed" and "reinstall pynacl, or matching = 'ecdh' in [run]" in found.way_out
    assert not [f for f in check_own_files(config, "server-0") if f.check == "matching"]


# planted misconfigurations -----------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """``plant`` breaks one thing; doctor must report (subject, check, status), with these words and a way out."""

    what: str
    plant: Callable[[Path, FederationConfig], Any]
    subject: str
    check: str
    words: str
    way_out: str
    status: str = "failed"


@dataclass
class Broken:
    """The doctor's side, the servers' side, and how the servers answer."""

    here: FederationConfig
    there: FederationConfig
    file_there: Path | None = None
    options: dict[str, Any] | None = None
    silent: tuple[str, ...] = ()
    stranger: str = ""  # what listens in the place of server 1: "talks", "silent" or "filtered"


def unresolvable(folder: Path, config: FederationConfig) -> Broken:
    return Broken(moved(config, 1, host="no-such-host.invalid"), config)


def closed_port(folder: Path, config: FederationConfig) -> Broken:
    return Broken(config, config, silent=("server-2",))


def not_tls(folder: Path, config: FederationConfig) -> Broken:
    return Broken(config, config, silent=("server-1",), stranger="talks")


def hangs(folder: Path, config: FederationConfig) -> Broken:
    return Broken(config, config, silent=("server-1",), stranger="silent")


def filtered(folder: Path, config: FederationConfig) -> Broken:
    return Broken(config, config, silent=("server-1",), stranger="filtered")


def new_key_there(folder: Path, config: FederationConfig) -> Broken:
    """Server 1 made a new key and pinned it in its own file only."""
    shutil.copy(folder / "federation.toml", folder / "old.toml")
    there = rekey(folder, "server-1")
    return Broken(load(folder / "old.toml"), there)


def two_certificates(hours: float) -> Callable[[Path, FederationConfig], Broken]:
    """Server 1 is getting a new key, and uses the earlier one."""

    def plant(folder: Path, config: FederationConfig) -> Broken:
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=hours)
        shutil.copy(folder / "federation.toml", folder / "old.toml")
        return Broken(rekey(folder, "server-1", until=until, folder="new"), config, file_there=folder / "old.toml")

    return plant


def other_pin_of_a_third(folder: Path, config: FederationConfig) -> Broken:
    """Server 0 has got a new key, which has reached our file only."""
    shutil.copy(folder / "federation.toml", folder / "old.toml")
    return Broken(rekey(folder, "server-0"), config, file_there=folder / "old.toml", silent=("server-0",))


def swapped_addresses(folder: Path, config: FederationConfig) -> Broken:
    first, second = config.servers[0], config.servers[1]
    return Broken(moved(moved(config, 0, port=second.port), 1, port=first.port), config)


def expired(folder: Path, config: FederationConfig) -> Broken:
    both = rekey(folder, "server-0", days=365, age=366)
    return Broken(both, both)


def expires_soon(folder: Path, config: FederationConfig) -> Broken:
    both = rekey(folder, "server-0", days=365, age=345)
    return Broken(both, both)


def wrong_role(folder: Path, config: FederationConfig) -> Broken:
    """The file pins, for server 1, a certificate that says it is a client's; with such a file no server starts."""
    both = rekey(folder, "server-1", role="urn:ppvfl:client:bank")
    return Broken(both, both, silent=("server-0", "server-1", "server-2"))


def other_version(folder: Path, config: FederationConfig) -> Broken:
    return Broken(config, config, options={"version": "0.0.9/1"})


def other_epsilon(folder: Path, config: FederationConfig) -> Broken:
    text = (folder / "federation.toml").read_text().replace("epsilon = 3.0", "epsilon = 8.0")
    (folder / "theirs.toml").write_text(text)
    return Broken(config, config, file_there=folder / "theirs.toml")


def wrong_clock(folder: Path, config: FederationConfig) -> Broken:
    return Broken(config, config, options={"clock": lambda: time.time() - 300.0})


def slow_clock(folder: Path, config: FederationConfig) -> Broken:
    return Broken(config, config, options={"clock": lambda: time.time() + 10.0})


def readable_key(folder: Path, config: FederationConfig) -> Broken:
    (folder / "bank/key.pem").chmod(0o640)
    return Broken(config, config)


def foreign_key(folder: Path, config: FederationConfig) -> Broken:
    shutil.copy(folder / "card/key.pem", folder / "bank/key.pem")
    return Broken(config, config)


def no_certificate(folder: Path, config: FederationConfig) -> Broken:
    (folder / "bank/certificate.pem").unlink()
    return Broken(config, config)


def not_pinned_there(folder: Path, config: FederationConfig) -> Broken:
    """We made a new key and pinned it in our file only: server 1 does not know it."""
    shutil.copy(folder / "federation.toml", folder / "old.toml")
    return Broken(rekey(folder, "bank"), config, file_there=folder / "old.toml")


def own_certificate_replaced(folder: Path, config: FederationConfig) -> Broken:
    """A new key at this host, but the file still pins the old one."""
    text = (folder / "federation.toml").read_text()
    rekey(folder, "bank")
    (folder / "federation.toml").write_text(text)
    return Broken(config, config)


def own_certificate_expired(folder: Path, config: FederationConfig) -> Broken:
    both = rekey(folder, "bank", days=10, age=20)
    return Broken(both, both)


PLANTED = [
    Planted("name", unresolvable, "server-1", "name resolves", "'no-such-host.invalid' does not", "correct host"),
    Planted("port", closed_port, "server-2", "port open", "nothing listens there", "start `ppvfl server`"),
    Planted("no TLS", not_tls, "server-1", "TLS handshake", "failed", "something else listens on this port"),
    Planted("hangs", hangs, "server-1", "TLS handshake", "timed out", "something else listens on this port"),
    Planted("firewall", filtered, "server-1", "port open", "does not answer in 2 s", "firewalls"),
    Planted("new key", new_key_there, "server-1", "certificate pinned", "presents", "by telephone"),
    Planted("two pins", two_certificates(1), "server-1", "certificate pinned", "until", "use the new", "warning"),
    Planted("two pins here", two_certificates(1), "server-1", "two certificates", "is accepted", "--until", "ok"),
    Planted("an old pin", two_certificates(-1), "server-1", "certificate pinned", "which is over", "use the new"),
    Planted("a third's", other_pin_of_a_third, "server-1", "configuration", "in common for server-0", "same file"),
    Planted("swapped", swapped_addresses, "server-0", "certificate pinned", "this is server-1's", "mixed up"),
    Planted("expired", expired, "server-0", "certificate valid", "expired on", "ppvfl key --as server-0"),
    Planted("expires", expires_soon, "server-0", "certificate valid", "expires in 19 days", "ppvfl key", "warning"),
    Planted("role", wrong_role, "server-1", "role in the file", "says urn:ppvfl:client:bank", "signing request"),
    Planted("version", other_version, "server-1", "version", "there 0.0.9/1", "the same version"),
    Planted("epsilon", other_epsilon, "server-1", "configuration", "[run] epsilon: here 3.0, there 8.0", "same file"),
    Planted("clock", wrong_clock, "server-2", "clock", "300.0", "NTP"),
    Planted("clock a little", slow_clock, "server-2", "clock", "s ahead", "NTP", "warning"),
    Planted("mode", readable_key, "bank", "own key safe", "mode 0640", "chmod 600"),
    Planted("foreign key", foreign_key, "bank", "own key matches", "different key pairs", "copy both"),
    Planted("no file", no_certificate, "bank", "own certificate", "does not exist", "--credentials"),
    Planted("not pinned there", not_pinned_there, "server-1", "accepts us", "refuses our certificate", "must pin"),
    Planted("not pinned here", own_certificate_replaced, "bank", "own certificate", "pins", "ppvfl pin"),
    Planted("own expired", own_certificate_expired, "bank", "own certificate valid", "expired on", "ppvfl key"),
]


@contextlib.contextmanager
def stranger(kind: str, port: int):
    """Something else where a server should be: it talks, but not TLS; it says nothing; or packets are dropped on the
    way (as by a firewall: the kernel drops them when a listener's queue is full)."""
    if not kind:
        yield
        return
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", port), backlog=0))
        if kind == "filtered":
            for _ in range(2):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    waiting.connect(("127.0.0.1", port))
            yield
            return

        def talk() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                stack.enter_context(connection)
                if kind == "talks":
                    connection.recv(10)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.what)
def test_planted_misconfigurations_are_found_and_named(tmp_path: Path, planted: Planted):
    broken = planted.plant(tmp_path, make_federation(tmp_path))
    names = [server.name for server in broken.there.servers if server.name not in broken.silent]
    with contextlib.ExitStack() as stack:
        stack.enter_context(stranger(broken.stranger, broken.there.servers[1].port))
        if names:
            options = broken.options or {}
            stack.enter_context(answering(broken.there, *names, as_file=broken.file_there, **options))
        findings = examine(broken.here, "bank", tmp_path / "bank", timeout=2.0)
    found = [f for f in findings if (f.subject, f.check) == (planted.subject, planted.check)]
    assert [f.status for f in found] == [planted.status], findings
    assert planted.words in found[0].found
    assert planted.way_out in found[0].way_out
    if planted.status == "failed" and planted.check in PEER_CHECKS[:4]:
        later = PEER_CHECKS[PEER_CHECKS.index(planted.check) + 1 :]
        assert [f.check for f in findings if f.subject == planted.subject and f.status == "skipped"] == list(later)


@pytest.mark.parametrize("moment", ["set_socket_options", "getpeercert"])
def test_a_peer_that_hangs_up_at_once_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Python looks at the socket in many places; a connection that was reset ended the doctor."""

    def reset(*_: Any, **__: Any) -> bytes:
        raise ConnectionResetError("reset by the peer")

    config = make_federation(tmp_path)
    server = config.servers[0]
    with answering(config, "server-0"):
        owner = checks if moment == "set_socket_options" else ssl.SSLSocket
        monkeypatch.setattr(owner, moment, reset)
        found = list(check_peer(config, "bank", server, (server.host, server.port)))
    wrong = [finding.check for finding in failed(found)]
    assert wrong == ([] if moment == "set_socket_options" else ["TLS handshake"])


def test_one_fault_is_reported_once(tmp_path: Path):
    """A server with another ε: its configuration row fails at each such peer, and nothing else does."""
    config = make_federation(tmp_path)
    broken = other_epsilon(tmp_path, config)
    with answering(config, "server-0", as_file=broken.file_there), answering(config, "server-1", "server-2"):
        findings = examine(config, "bank", timeout=2.0)
    assert [(f.subject, f.check) for f in failed(findings)] == [("server-0", "configuration")]


# the command -------------------------------------------------------------------------------------


def test_exit_code_table_and_json(tmp_path: Path, capsys):
    config = make_federation(tmp_path)
    arguments = ["doctor", "--as", "bank", "--config", config.source, "--timeout", "2"]
    with answering(config):
        assert main(arguments) == 0
    assert "everything a run needs is in place" in capsys.readouterr().out
    with answering(config, "server-0", "server-1"):
        assert main([*arguments, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    wrong = [f for f in report["findings"] if f["status"] == "failed"]
    assert [(f["subject"], f["check"]) for f in wrong] == [("server-2", "port open")]


def test_a_wrong_file_is_a_finding_too(tmp_path: Path, capsys):
    config = make_federation(tmp_path)
    path = Path(config.source)
    path.write_text(path.read_text().replace("epsilon = 3.0", "epsilom = 3.0"))
    assert main(["doctor", "--as", "bank", "--config", str(path), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["check"] == "file"
    assert "did you mean 'epsilon'" in finding["found"]


def test_answer_mode_in_a_process_of_its_own(tmp_path: Path):
    """Two hosts without any server running yet: one answers, the other asks; also between clients."""
    config = make_federation(tmp_path)
    port = config.servers[0].port
    command = [sys.executable, "-m", "protocols.deploy", "doctor", "--answer", "--config", config.source, "--as"]
    process = subprocess.Popen(
        [*command, "card", "--listen", f"127.0.0.1:{port}"], stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert f"card answers doctors at 127.0.0.1:{port}" in process.stdout.readline()
        path = Path(config.source)
        path.write_text(path.read_text().replace("127.0.0.1:7101", f"127.0.0.1:{port}"))
        findings = examine(load(path), "bank", alignment=True, timeout=2.0)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        process.communicate()
    assert {f.status for f in findings if f.subject == "card"} == {"ok"}
    (pinned,) = [f for f in findings if (f.subject, f.check) == ("server-0", "certificate pinned")]
    assert "this is card's certificate" in pinned.found


def test_answering_needs_an_address_of_this_host(tmp_path: Path, capsys):
    config = make_federation(tmp_path)
    arguments = ["doctor", "--as", "server-0", "--config", config.source, "--answer", "--listen", "192.0.2.1:7000"]
    assert main(arguments) == 2
    assert "cannot listen at 192.0.2.1:7000" in capsys.readouterr().err


# the answering side ------------------------------------------------------------------------------


def call(config: FederationConfig, credentials: Credentials) -> ssl.SSLSocket:
    connection = socket.create_connection(config.addresses[0], timeout=3.0)
    secured = secure(connection, credentials, server_side=False)
    secured.settimeout(3.0)
    secured.do_handshake()
    return secured


def ask(connection: ssl.SSLSocket, **message: Any) -> dict[str, Any]:
    deadline = time.monotonic() + 3.0
    send(connection, message, deadline)
    return parse(receive(connection, "server-0", deadline), "server-0")


def test_who_is_answered(tmp_path: Path):
    config = make_federation(tmp_path)
    bank = load_credentials(config, "bank")
    with answering(config, "server-0"):
        with call(config, bank) as connection:
            facts = ask(connection, purpose="doctor", **{"from": "bank", "to": "server-0"})
            assert facts["version"] == software_version()
            assert set(facts) == {
                "from",
                "version",
                "hash",
                "pins",
                "agreed",
                "time",
                "state",
                "free_bytes",
                "budget",
            }, "public facts only"
        refusals: dict[str, dict[str, Any]] = {
            "client 'card' presented the certificate": {"from": "card", "to": "server-0"},
            "'mallory' is no participant": {"from": "mallory", "to": "server-0"},
            "is no participant": {"from": 0, "to": "server-0"},
            "this is server-0, not 'server-1'": {"from": "bank", "to": "server-1"},
        }
        for sentence, names in refusals.items():
            with call(config, bank) as connection:
                assert sentence in ask(connection, purpose="doctor", **names)["refused"]
        with call(config, bank) as connection:
            assert "only doctors are answered here" in ask(connection, purpose="upload", **{"from": "bank"})["refused"]


@pytest.mark.parametrize("request_", [{"download": MAX_TRANSFER + 1}, {"upload": 10**12}, {"upload": 0}])
def test_transfers_are_bounded(tmp_path: Path, request_):
    config = make_federation(tmp_path)
    with answering(config, "server-0"), call(config, load_credentials(config, "bank")) as connection:
        ask(connection, purpose="doctor", **{"from": "bank", "to": "server-0"})
        assert "transfers of at most" in ask(connection, **request_)["refused"]
        assert connection.recv(1) == b""


def test_a_visit_is_bounded_in_requests(tmp_path: Path):
    config = make_federation(tmp_path)
    with answering(config, "server-0"), call(config, load_credentials(config, "bank")) as connection:
        ask(connection, purpose="doctor", **{"from": "bank", "to": "server-0"})
        with pytest.raises(Exception, match="closed the connection"):
            for _ in range(100):
                ask(connection, echo=True)


@pytest.mark.parametrize(
    "words",
    [b"", b"garbage" * 100, LENGTH.pack(MAX_MESSAGE + 1), LENGTH.pack(2) + b"[]", LENGTH.pack(3) + b"\xff\xfe\x00"],
    ids=["nothing", "garbage", "oversized", "no table", "no text"],
)
def test_garbage_is_survived(tmp_path: Path, words: bytes):
    config = make_federation(tmp_path)
    bank = load_credentials(config, "bank")
    with answering(config, "server-0"):
        with call(config, bank) as connection:
            connection.sendall(words)
        with socket.create_connection(config.addresses[0]) as plain:
            plain.sendall(words or b"x")
        assert not failed([f for f in examine(config, "bank", timeout=2.0) if f.subject == "server-0"])


def test_visitors_are_bounded(tmp_path: Path):
    config = make_federation(tmp_path)
    bank = load_credentials(config, "bank")
    names = {"from": "bank", "to": "server-0"}
    with answering(config, "server-0"), contextlib.ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(call(config, bank))
            assert "refused" not in ask(connection, purpose="doctor", **names)
        fifth = stack.enter_context(call(config, bank))
        assert "doctors are here already" in ask(fifth, purpose="doctor", **names)["refused"]


def test_the_state_is_told(tmp_path: Path):
    config = make_federation(tmp_path)
    with answering(config, "server-0", state=lambda: "training, step 7 of 80"):
        findings = examine(config, "bank", timeout=2.0)
    (finding,) = [f for f in findings if (f.subject, f.check) == ("server-0", "accepts us")]
    assert "training, step 7 of 80" in finding.found


@pytest.mark.parametrize(("free", "status"), [(10 << 20, "failed"), (1 << 30, "warning"), (1 << 40, "ok")])
def test_a_disk_without_room_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str):
    """Own disk and those of the peers: a full one was all green."""
    config = make_federation(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2 * free, free, free))
    with answering(config, "server-0"):
        found = {f.subject: f for f in examine(config, "bank") if f.check == "disk"}
    assert {found["bank"].status, found["server-0"].status} == {status}
