"""Who gets in: mutual TLS between participants of one file, and everybody else at the door."""

from __future__ import annotations

import datetime
import shutil
import socket
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from protocols.federation.read import ConfigurationError, load
from protocols.net.credentials import load_credentials
from protocols.net.wire import caller_of
from refmpc.core.errors import HandshakeError
from refmpc.net.certificates import self_signed
from refmpc.net.framing import Peer
from refmpc.net.greeting import Greeting
from refmpc.net.rendezvous import connect_client, connect_party, listen
from refmpc.net.tls import Credentials, secure, wrong_pin
from tests.protocols.run.hosts.federations import Authority, make_federation, rekey, write_pair

GREETING = Greeting("the run", {"rows": 3})


def meet(server: Credentials, client: Credentials, name: str = "bank") -> tuple[list[str], str]:
    """Server 0 waits for one client (the other servers are left out); returns who got in, and what the caller heard."""
    inside: list[str] = []
    listener = listen()
    address = listener.getsockname()[:2]

    def serve() -> None:
        try:
            connect_party(0, listener, {}, GREETING, credentials=server, clients={name}, timeout=1.5)
        except HandshakeError as error:  # the other two servers never come; it tells who was refused meanwhile
            inside.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    heard = ""
    try:
        connect_client(name, dict.fromkeys(range(3), address), GREETING, credentials=client, timeout=1.0)
    except Exception as error:
        heard = str(error)
    thread.join()
    listener.close()
    return inside, heard


def foreign_pair(directory: Path, role: str) -> None:
    """A key with a certificate that says the right role, but is pinned nowhere."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = self_signed(key, "bank", ["127.0.0.1"], role)
    write_pair(directory, key, certificate)


def impostor(good: Credentials, directory: Path) -> Credentials:
    return Credentials(directory / "certificate.pem", directory / "key.pem", good.trusted, good.pinned)


@pytest.fixture
def federation(tmp_path: Path):
    return make_federation(tmp_path / "fed")


def test_three_servers_and_a_client_meet_over_tls(tmp_path: Path):
    """Certificates of the organisation's own authority: trusted because pinned, without the authority anywhere."""
    make_federation(tmp_path, keys="requests")
    authority = Authority()
    for name in ("server-0", "server-1", "server-2", "bank", "card"):
        authority.sign_and_pin(tmp_path, name)
    config = load(tmp_path / "federation.toml")
    listeners = [listen() for _ in range(3)]
    addresses = {i: listener.getsockname()[:2] for i, listener in enumerate(listeners)}
    met: dict[object, set[object]] = {}

    def party(i: int) -> None:
        own = load_credentials(config, f"server-{i}")
        found = connect_party(i, listeners[i], addresses, GREETING, credentials=own, clients={"bank"}, timeout=10)
        met[i] = set(found)
        for connection in found.values():
            connection.close()

    threads = [threading.Thread(target=party, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    found = connect_client("bank", addresses, GREETING, credentials=load_credentials(config, "bank"), timeout=10)
    for thread in threads:
        thread.join()
    assert set(found) == {0, 1, 2}
    assert {connection.version() for connection in found.values()} == {"TLSv1.3"}  # type: ignore[attr-defined]
    assert met == {0: {1, 2, "bank"}, 1: {0, 2, "bank"}, 2: {0, 1, "bank"}}
    for connection in (*found.values(), *listeners):
        connection.close()


def test_a_certificate_nobody_pinned_is_refused_in_the_handshake(federation, tmp_path: Path):
    foreign_pair(tmp_path / "out", "urn:ppvfl:client:bank")
    good = load_credentials(federation, "bank")
    inside, _ = meet(load_credentials(federation, "server-0"), impostor(good, tmp_path / "out"))
    assert "TLS handshake with a caller at 127.0.0.1 failed" in inside[0]
    assert "client 'bank'" in inside[0], "it still waits for the real one"


def test_another_certificate_of_the_same_authority_is_refused(tmp_path: Path):
    """Pinned certificates are trusted, not their authority: a colleague's certificate opens nothing."""
    fed = tmp_path / "fed"
    make_federation(fed, keys="requests")
    authority = Authority()
    for name in ("server-0", "server-1", "server-2", "bank", "card"):
        authority.sign_and_pin(fed, name)
    config = load(fed / "federation.toml")
    other = tmp_path / "colleague"
    make_federation(other, keys="requests")
    authority.sign_and_pin(other, "bank")
    inside, _ = meet(load_credentials(config, "server-0"), impostor(load_credentials(config, "bank"), other / "bank"))
    assert "TLS handshake with a caller at 127.0.0.1 failed" in inside[0]


def test_an_expired_certificate_is_refused_although_it_is_pinned(federation, tmp_path: Path):
    config = rekey(tmp_path / "fed", "bank", days=10, age=11)
    inside, _ = meet(load_credentials(config, "server-0"), load_credentials(config, "bank"))
    assert "certificate has expired" in inside[0]


def verdicts(server: Credentials, client: Credentials) -> dict[str, str]:
    """What server 0 says of the bank's certificate, and the bank of the server's; "TLS" if the handshake has refused
    it."""
    said = {}
    here, there = socket.socketpair()

    def shake(name: str, end: socket.socket, credentials: Credentials, peer: Peer) -> None:
        with secure(end, credentials, server_side=name == "server-0") as connection:
            try:
                connection.settimeout(10)
                connection.do_handshake()
                said[name] = wrong_pin(connection, credentials, peer)
                assert name == "bank" or caller_of(connection, credentials) == "bank"
            except OSError:
                said[name] = "TLS"

    thread = threading.Thread(target=shake, args=("server-0", here, server, "bank"))
    thread.start()
    shake("bank", there, client, 0)
    thread.join()
    return said


@pytest.mark.parametrize("hours", [1, -1])
@pytest.mark.parametrize("who", ["bank", "server-0"])
def test_two_certificates_of_a_participant_are_accepted_until_the_stated_end(federation, tmp_path, who, hours):
    """At either end of a connection; from then on the earlier one is refused in a sentence that names the time."""
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=hours)
    other = "bank" if who == "server-0" else "server-0"
    old = {name: load_credentials(federation, name) for name in ("server-0", "bank")}
    config = rekey(tmp_path / "fed", who, until=until, folder="new")
    new = load_credentials(config, who, tmp_path / "fed/new")
    widened = load_credentials(config, other)
    earlier = impostor(new, tmp_path / "fed" / who)
    for owner, accepted in ((new, True), (earlier, hours > 0)):
        found = verdicts(*((owner, widened) if who == "server-0" else (widened, owner)))
        says = f"earlier certificate, {federation.participant(who).fingerprint[:16]}… until {until:%Y-%m-%d %H:%M} UTC"
        assert found[who] == ""
        assert found[other] == "" if accepted else says in found[other] and "which is over" in found[other]
    found = verdicts(*((new, old[other]) if who == "server-0" else (old[other], new)))
    assert found[other] == "TLS", "whose file has the earlier one only"
    if hours > 0:
        assert load_credentials(config, who).earlier == new.earlier  # its owner may go on with the earlier pair
    else:
        with pytest.raises(ConfigurationError, match=f"{until:%Y-%m-%d %H:%M} UTC: the others refuse it; use the one"):
            load_credentials(config, who)


def test_a_stolen_certificate_opens_no_other_door(federation):
    """The card company's key, stolen: it is trusted, but not for the bank."""
    stolen = load_credentials(federation, "card")
    inside, heard = meet(load_credentials(federation, "server-0"), stolen, name="bank")
    assert "client 'bank' presented the certificate" in inside[0]
    assert "compare the fingerprints with its owner" in inside[0]
    assert federation.participant("bank").fingerprint[:16] in heard or "presented" in heard


def test_a_client_cannot_play_a_server(federation):
    good = load_credentials(federation, "bank")
    listener = listen()
    address = listener.getsockname()[:2]
    problems: list[str] = []

    def play() -> None:
        try:
            connect_party(0, listener, {}, GREETING, credentials=good, clients={"card"}, timeout=1.5)
        except HandshakeError as error:
            problems.append(str(error))

    thread = threading.Thread(target=play)
    thread.start()
    with pytest.raises(HandshakeError, match=r"server-\d presented the certificate"):
        connect_client(
            "card",
            dict.fromkeys(range(3), address),
            GREETING,
            credentials=load_credentials(federation, "card"),
            timeout=1.0,
        )
    thread.join()
    listener.close()


# files -------------------------------------------------------------------------------------------


def test_a_key_that_others_may_read_is_refused(federation, tmp_path: Path):
    (tmp_path / "fed/bank/key.pem").chmod(0o644)
    with pytest.raises(ConfigurationError, match=r"key.pem has mode 0644, .*must be 0600; chmod 600"):
        load_credentials(federation, "bank")


def test_key_of_another_certificate(federation, tmp_path: Path):
    shutil.copy(tmp_path / "fed/card/key.pem", tmp_path / "fed/bank/key.pem")
    with pytest.raises(ConfigurationError, match=r"key.pem does not belong to .*certificate.pem"):
        load_credentials(federation, "bank")


def test_an_encrypted_key_is_refused_without_asking(federation, tmp_path: Path):
    file = tmp_path / "fed/bank/key.pem"
    key = serialization.load_pem_private_key(file.read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"secret")
    file.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret))
    with pytest.raises(ConfigurationError, match=r"cannot be used .*without a passphrase"):
        load_credentials(federation, "bank")


def test_certificate_that_is_not_the_pinned_one(federation, tmp_path: Path):
    foreign_pair(tmp_path / "fed/bank", "urn:ppvfl:client:bank")
    with pytest.raises(
        ConfigurationError, match=r"certificate.pem has the fingerprint .*pins .*the others would refuse"
    ):
        load_credentials(federation, "bank")


def test_missing_files_are_named(federation, tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"nowhere/certificate.pem does not exist: make it with `ppvfl key`"):
        load_credentials(federation, "bank", tmp_path / "nowhere")
    (tmp_path / "fed/bank/key.pem").unlink()
    with pytest.raises(ConfigurationError, match=r"key.pem does not exist: give its directory with --credentials"):
        load_credentials(federation, "bank")


def test_a_certificate_in_the_file_that_was_exchanged_is_noticed(federation, tmp_path: Path):
    """Somebody who edits the certificate but not the fingerprint (or the other way round) gets nowhere."""
    path = tmp_path / "fed/federation.toml"
    mine, theirs = (federation.certificates[name].strip() for name in ("server-1", "card"))
    path.write_text(path.read_text().replace(mine, theirs, 1))
    with pytest.raises(ConfigurationError, match=r"\[certificates\] server-1 has the fingerprint .*is pinned: compare"):
        load_credentials(load(path), "bank")


def test_a_pinned_certificate_with_another_role_is_refused(federation, tmp_path: Path):
    config = rekey(tmp_path / "fed", "server-1", role="urn:ppvfl:client:bank")
    with pytest.raises(ConfigurationError, match=r"certificate of server-1 says urn:ppvfl:client:bank"):
        load_credentials(config, "bank")


def test_the_key_is_never_shown(federation):
    shown = repr(load_credentials(federation, "bank"))
    assert "key.pem" not in shown
    assert "BEGIN" not in repr(federation)
