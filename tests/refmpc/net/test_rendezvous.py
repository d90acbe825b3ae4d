"""Who is let in, who is refused, and what everybody is told: certificates, greetings, strangers at the door."""

from __future__ import annotations

import json
import os
import socket
import ssl
import struct
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from refmpc.core.errors import HandshakeError, PeerAborted, PeerTimeout, RefmpcError
from refmpc.net import rendezvous, tls
from refmpc.net.certificates import fingerprint, make_certificate, make_credentials
from refmpc.net.greeting import PROTOCOL_VERSION, Greeting
from refmpc.net.rendezvous import connect_client, connect_party, is_loopback, listen, listen_everywhere, listen_here
from tests.refmpc.participants import all_end, meet

SAME = Greeting("one run", {"rows": 10})
PARTIES = (0, 1, 2)


def close_all(met):
    for connections in met.values():
        if isinstance(connections, dict):
            for connection in connections.values():
                connection.close()


def sentences(met):
    """What each participant said when it ended; all must have ended with an error of the library."""
    for outcome in met.values():
        assert isinstance(outcome, RefmpcError), outcome
    return {peer: str(outcome) for peer, outcome in met.items()}


@pytest.fixture
def credentials(tmp_path):
    return make_credentials([*PARTIES, "bank"], tmp_path)


@pytest.fixture(params=["plain", "tls"])
def some_credentials(request, tmp_path):
    return make_credentials([*PARTIES, "bank"], tmp_path) if request.param == "tls" else None


@pytest.fixture(autouse=True)
def no_sockets_and_threads_left():
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    yield
    until = time.monotonic() + 3
    while any(thread.name == "refmpc greeting" for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(thread.name == "refmpc greeting" for thread in threading.enumerate())
    assert not before or len(os.listdir("/proc/self/fd")) <= before


def test_three_parties_and_a_client_are_connected_with_each_other(some_credentials):
    met = meet(dict.fromkeys((*PARTIES, "bank"), SAME), credentials=some_credentials, clients=("bank",))
    assert {peer: set(connections) for peer, connections in met.items()} == {
        0: {1, 2, "bank"},
        1: {0, 2, "bank"},
        2: {0, 1, "bank"},
        "bank": {0, 1, 2},
    }
    close_all(met)


@pytest.mark.parametrize("moment", ["set_socket_options", "wrong_pin"])
def test_a_connection_that_breaks_at_any_moment_is_told_in_a_sentence(credentials, monkeypatch, moment):
    """Whatever looks at a socket that was reset raises an error of the system."""
    original = getattr(rendezvous, moment)

    def reset(connection, *more):
        if threading.current_thread().name == "refmpc greeting" and len(more) < 3:
            raise ConnectionResetError("reset by the peer")
        return original(connection, *more)

    monkeypatch.setattr(rendezvous, moment, reset)
    greetings = dict.fromkeys((*PARTIES, "bank"), SAME)
    met = meet(greetings, credentials=credentials, clients=("bank",), timeout=3.0)
    assert any("closed the connection during the greeting" in words for words in sentences(met).values())


# different parties ------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_different_parameters_are_named_at_all_parties_with_field_and_values(some_credentials, odd):
    begun = time.monotonic()
    greetings = {peer: SAME if peer != odd else Greeting("one run", {"rows": 11}) for peer in PARTIES}
    said = sentences(meet(greetings, credentials=some_credentials, timeout=5))
    for peer, sentence in said.items():
        assert "parameter 'rows' = " in sentence, (peer, sentence)
        assert "10" in sentence
        assert "11" in sentence
        assert f"server-{odd}" in sentence or peer == odd
    assert time.monotonic() - begun < 4, "a known difference must not be waited out"


def test_a_missing_parameter_is_a_difference():
    greetings = dict.fromkeys(PARTIES, SAME) | {2: Greeting("one run", {})}
    said = sentences(meet(greetings, timeout=5))
    assert any("server-2 has parameter 'rows' = missing, server-" in sentence for sentence in said.values())


def test_equal_parameters_in_another_order_and_not_a_number_are_equal():
    one: dict[Any, Any] = {"a": float("nan"), "b": {"x": 1, "y": [1, 2]}, 3: 4}
    other: dict[Any, Any] = {3: 4, "b": {"y": (1, 2), "x": 1}, "a": float("nan")}
    first, second = Greeting("one run", one), Greeting("one run", other)
    met = meet({0: first, 1: second, 2: first})
    assert all(isinstance(connections, dict) for connections in met.values()), met
    close_all(met)


def test_a_client_with_other_parameters_is_named_at_all_servers():
    greetings = dict.fromkeys(PARTIES, SAME) | {"bank": Greeting("one run", {"rows": 99})}
    said = sentences(meet(greetings, clients=("bank",), timeout=5))
    assert all("99" in sentence and "parameter 'rows'" in sentence for sentence in said.values()), said
    assert all("client 'bank'" in said[peer] for peer in PARTIES)


def test_a_party_of_another_run_is_refused_and_both_sides_say_so(some_credentials):
    greetings = dict.fromkeys(PARTIES, SAME) | {2: Greeting("another run", {"rows": 10})}
    said = sentences(meet(greetings, credentials=some_credentials, timeout=1))
    assert "server-2 belongs to another run than server-" in said[2]
    assert "refused this participant" in said[2]
    for peer in (0, 1):
        assert "server-2 did not connect in 1 s" in said[peer]
    assert "refused meanwhile: server-2 belongs to another run than server-0" in said[0]


def test_a_party_with_another_version_is_named_with_both_versions(monkeypatch):
    words = Greeting.words

    def newer(self, sender, receiver):
        return words(self, sender, receiver) | ({"version": 7} if sender == 2 else {})

    monkeypatch.setattr(Greeting, "words", newer)
    said = sentences(meet(dict.fromkeys(PARTIES, SAME), timeout=1))
    assert f"server-2 has version = 7, server-0 has {PROTOCOL_VERSION}: they must agree" in said[0]
    assert "has version = 7" in said[2]
    assert "server-2" in said[1]


def test_the_run_is_never_said_aloud(monkeypatch):
    spoken = []

    def overheard(connection, message, deadline):
        spoken.append(json.dumps(message))
        tls.send(connection, message, deadline)

    monkeypatch.setattr(rendezvous, "send", overheard)
    close_all(meet(dict.fromkeys(PARTIES, Greeting("a well kept secret", {}))))
    assert spoken
    assert not any("a well kept secret" in message for message in spoken)


def test_parameters_that_cannot_be_compared_are_refused_at_once():
    with pytest.raises(ValueError, match="plain JSON"):
        Greeting("run", {"f": object()})
    with pytest.raises(ValueError, match="size of parameters"):
        Greeting("run", {"f": "x" * 100_000})


# who does not come ------------------------------------------------------------------------------


def test_a_party_that_never_starts_is_named_by_both_others():
    begun = time.monotonic()
    listener = listen()  # nobody accepts: the address of server-2 is not even called
    said = sentences(meet(dict.fromkeys((0, 1), SAME), timeout=1))
    listener.close()
    assert "server-2 did not connect in 1 s" in said[0]
    assert "server-2 did not connect in 1 s" in said[1]
    assert time.monotonic() - begun < 4


def test_a_party_whose_port_is_closed_cannot_be_reached():
    listener = listen()
    address: tuple[str, int] = listener.getsockname()
    listener.close()
    with pytest.raises(PeerTimeout, match=r"server-[012] at 127.0.0.1:\d+ cannot be reached for 0.5 s: .*refused"):
        connect_client("bank", dict.fromkeys(range(3), address), SAME, timeout=0.5)


def test_a_party_that_accepts_but_never_answers_is_named():
    listener = listen()
    with pytest.raises(HandshakeError, match=r"server-. is connected but sent no greeting in time"):
        connect_client("bank", {party: listener.getsockname() for party in PARTIES}, SAME, timeout=0.5)
    listener.close()


def test_the_reason_of_a_party_that_cannot_begin_reaches_those_that_can():
    """Client 'bank' never comes: server-0 and 1 wait for it, 2 has a longer patience and still hears why."""
    listeners = [listen() for _ in PARTIES]
    addresses = {i: listener.getsockname() for i, listener in enumerate(listeners)}

    def party(i):
        clients = ("bank",) if i == 0 else ()
        return lambda: connect_party(i, listeners[i], addresses, SAME, clients=clients, timeout=1 if i == 0 else 20)

    begun = time.monotonic()
    met = all_end({i: party(i) for i in PARTIES})
    for listener in listeners:
        listener.close()
    assert isinstance(met[0], PeerTimeout)
    for peer in (1, 2):
        assert isinstance(met[peer], PeerAborted)
        assert "gave up before the run began: " in str(met[peer])
        assert "client 'bank' did not connect in 1 s" in str(met[peer])
    assert time.monotonic() - begun < 5


# strangers --------------------------------------------------------------------------------------


def strangers(*messages):
    """Connections to every listener, made before anybody else calls; they stay open until closed."""
    opened = []

    def visit(addresses):
        for address in addresses:
            for message in messages:
                visitor = socket.create_connection(address)
                visitor.sendall(message)
                opened.append(visitor)

    return opened, visit


def framed(value):
    words = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<I", len(words)) + words


STRANGE = {
    "silent": b"",
    "half a length": b"\x01",
    "http": b"GET / HTTP/1.0\r\n\r\n",
    "oversized": struct.pack("<I", 2**31),
    "not json": framed(b"{{{{"),
    "not text": framed(b"\xff\xfe\xfd"),
    "deep": framed(b"[" * 60_000),
    "a list": framed([1, 2]),
    "unhashable name": framed({"from": [1]}),
    "name true": framed({"from": True}),
    "unknown name": framed({"from": "mallory", "to": 0}),
    "no run": framed({"from": 2, "to": 0, "version": PROTOCOL_VERSION}),
    "odd types": framed({"from": 2, "to": 0, "version": PROTOCOL_VERSION, "run": {}, "parameters": 3}),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_stranger_does_not_keep_the_right_peers_out(kind):
    opened, visit = strangers(STRANGE[kind])
    begun = time.monotonic()
    met = meet(dict.fromkeys(PARTIES, SAME), before=visit, timeout=3)
    assert all(isinstance(connections, dict) for connections in met.values()), met
    assert time.monotonic() - begun < 2.5
    close_all(met)
    for visitor in opened:
        visitor.close()


def test_many_silent_strangers_do_not_keep_the_right_peers_out_over_tls(credentials):
    opened, visit = strangers(*[b""] * 10, *[b"GET / HTTP/1.0\r\n\r\n"] * 3)
    met = meet(dict.fromkeys(PARTIES, SAME), credentials=credentials, before=visit, timeout=8)
    assert all(isinstance(connections, dict) for connections in met.values()), met
    close_all(met)
    for visitor in opened:
        visitor.close()


def test_a_stranger_that_trickles_is_sent_away_in_time(monkeypatch):
    """Time is of the whole greeting, not of each byte of it."""
    monkeypatch.setattr(rendezvous, "PATIENCE", 0.3)
    near, far = socket.socketpair()

    def trickle():
        for _ in range(10):
            time.sleep(0.05)
            far.send(b"\0")

    outcomes = all_end(
        {
            "far": trickle,
            "near": lambda: tls._receive_exactly(near, 100, "a caller", time.monotonic() + 0.3),
        }
    )
    near.close()
    far.close()
    assert "a caller is connected but sent no greeting in time" in str(outcomes["near"])


def test_what_strangers_were_told_is_part_of_the_final_sentence():
    opened, visit = strangers(STRANGE["oversized"], STRANGE["unknown name"])
    said = sentences(meet({0: SAME}, before=visit, timeout=1))
    assert "server-1 and server-2 did not connect in 1 s; refused meanwhile: " in said[0]
    assert "a caller at 127.0.0.1 sent a greeting of 2147483648 bytes: not a participant of this run" in said[0]
    assert "a caller at 127.0.0.1 calls itself 'mallory', who is not expected here" in said[0]
    for visitor in opened:
        visitor.close()


# certificates -----------------------------------------------------------------------------------


def test_a_certificate_of_another_authority_is_refused_and_named(credentials, tmp_path):
    certificate, key = make_certificate("impostor", tmp_path)
    mine = credentials | {2: replace(credentials[2], certificate=certificate, key=key)}
    said = sentences(meet(dict.fromkeys(PARTIES, SAME), credentials=mine, timeout=1))
    assert "server-2 did not connect in 1 s; refused meanwhile: the TLS handshake with a caller at 127.0.0.1" in said[0]
    assert "self-signed certificate" in said[0]
    assert "server-2" in said[1]
    assert "server-0" in said[2] or "server-1" in said[2]
    assert "closed the connection during the greeting: it refused this party" in said[2]


def test_a_listener_with_the_wrong_certificate_is_refused_by_its_callers(credentials, tmp_path):
    certificate, key = make_certificate("impostor", tmp_path)
    mine = credentials | {0: replace(credentials[0], certificate=certificate, key=key)}
    said = sentences(meet(dict.fromkeys(PARTIES, SAME), credentials=mine, timeout=1))
    assert any("the TLS handshake with server-0 failed: self-signed certificate" in said[peer] for peer in (1, 2))
    assert all("server-0" in said[peer] for peer in (1, 2))
    assert "did not connect in 1 s; refused meanwhile: the TLS handshake with a caller" in said[0]


def test_the_certificate_of_another_party_is_refused_with_both_fingerprints(credentials):
    """Server-2 presents server-1's certificate: trusted, but pinned for somebody else."""
    mine = credentials | {2: replace(credentials[2], certificate=credentials[1].certificate, key=credentials[1].key)}
    said = sentences(meet(dict.fromkeys(PARTIES, SAME), credentials=mine, timeout=1))
    got, pinned = fingerprint(credentials[1].certificate)[:16], credentials[0].pinned[2][:16]
    sentence = f"server-2 presented the certificate {got}…, but {pinned}… is pinned for it"
    assert sentence in said[0]
    assert f"refused this participant: {sentence}" in said[2]
    assert "server-2" in said[1]


def test_a_peer_that_nobody_pinned_is_refused(credentials):
    unpinned = {peer: hex_ for peer, hex_ in credentials[0].pinned.items() if peer != 2}
    mine = credentials | {0: replace(credentials[0], pinned=unpinned)}
    said = sentences(meet(dict.fromkeys(PARTIES, SAME), credentials=mine, timeout=1))
    assert "server-2 presented the certificate" in said[0]
    assert "but none is pinned for it" in said[0]


def test_a_plain_party_among_tls_parties_is_named(credentials):
    mine = {peer: None if peer == 2 else credentials[peer] for peer in PARTIES}
    said = sentences(meet(dict.fromkeys(PARTIES, SAME), credentials=mine, timeout=1))
    assert "server-2 did not connect" in said[0]
    assert "server-2" in said[1]
    assert "server-0" in said[2] or "server-1" in said[2]


def test_tls_1_2_is_not_spoken(credentials):
    listener = listen()
    addresses = {party: listener.getsockname() for party in PARTIES}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2

    def old():
        with socket.create_connection(listener.getsockname()) as raw, context.wrap_socket(raw) as wrapped:
            return wrapped.version()

    outcomes = all_end(
        {"old": old, 0: lambda: connect_party(0, listener, addresses, SAME, credentials=credentials[0], timeout=1)}
    )
    listener.close()
    assert isinstance(outcomes["old"], ssl.SSLError)
    assert "the TLS handshake with a caller at 127.0.0.1 failed: UNSUPPORTED_PROTOCOL" in str(outcomes[0])


def test_a_certificate_file_that_is_missing_is_named(credentials, tmp_path):
    broken = replace(credentials["bank"], certificate=tmp_path / "gone.crt")
    listener = listen()
    with pytest.raises(HandshakeError, match=r"gone\.crt cannot be used"):
        connect_client(
            "bank", {party: listener.getsockname() for party in PARTIES}, SAME, credentials=broken, timeout=2
        )
    listener.close()


def test_names_of_clients_need_not_be_file_names(tmp_path):
    found = make_credentials([0, 1, 2, "server-0", "../../bank", "trusted"], tmp_path)
    assert len({credentials.certificate for credentials in found.values()}) == 6
    assert all(credentials.key.parent == tmp_path for credentials in found.values())
    assert all(credentials.key.stat().st_mode & 0o777 == 0o600 for credentials in found.values())
    assert found["server-0"].pinned["server-0"] != found["server-0"].pinned[0]


# plain TCP --------------------------------------------------------------------------------------


def test_plain_tcp_to_another_host_is_refused_before_anything_is_sent(monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("it connected"))
    addresses = {0: ("192.0.2.1", 1), 1: ("192.0.2.1", 2), 2: ("192.0.2.1", 3)}
    with pytest.raises(HandshakeError, match=r"server-0 is at 192.0.2.1, which is not a loopback address.*credentials"):
        connect_client("bank", addresses, SAME, timeout=1)


def test_a_plain_listener_that_other_hosts_could_reach_is_refused():
    listener = socket.create_server(("0.0.0.0", 0))
    with pytest.raises(HandshakeError, match=r"this party \(server-0\) listens at 0.0.0.0, which is not a loopback"):
        connect_party(0, listener, {}, SAME, timeout=1)
    listener.close()


def test_loopback_addresses_are_known():
    assert is_loopback("127.0.0.1")
    assert is_loopback("127.8.9.1")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")
    with pytest.raises(HandshakeError, match=r"the host name 'no\.such\.host\.invalid' does not resolve"):
        is_loopback("no.such.host.invalid")


def test_participants_of_one_machine_meet_in_a_directory_or_where_its_name_is_too_long_on_loopback(tmp_path):
    outcomes = meet(dict.fromkeys([0, 1, 2, "bank"], Greeting("run", {})), clients=("bank",), directory=tmp_path)
    assert all(link.family == socket.AF_UNIX for links in outcomes.values() for link in links.values())
    for links in outcomes.values():
        for link in links.values():
            link.close()
    listener, address = listen_here(tmp_path / ("long" * 30), "0")
    with listener:
        assert address == ("127.0.0.1", listener.getsockname()[1])


def test_a_unix_socket_that_nobody_listens_at_is_named(tmp_path):
    address = str(tmp_path / "nobody")
    with pytest.raises(PeerTimeout, match=f"server-[012] at {address} cannot be reached for 0.3 s"):
        connect_client("bank", dict.fromkeys(range(3), address), Greeting("run", {}), timeout=0.3)


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("only-six.example", ["::1"]),  # a name with AAAA alone ended a server
        ("only-four.example", ["127.0.0.1"]),
        ("both.example", ["127.0.0.1", "::1"]),
        ("one-of-two.example", ["127.0.0.1"]),  # the other address is not of this host
        ("::1", ["::1"]),
        ("::", ["::"]),
    ],
)
def test_a_listener_is_at_every_address_of_its_name(monkeypatch, host, found):
    names = {
        "only-six.example": ["::1"],
        "only-four.example": ["127.0.0.1"],
        "both.example": ["127.0.0.1", "::1"],
        "one-of-two.example": ["127.0.0.1", "2001:db8::1"],
    }
    resolve = socket.getaddrinfo

    def as_the_names_say(name, *rest, **more):  # in place of a name server
        return [item for address in names.get(name, [name]) for item in resolve(address, *rest, **more)]

    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    monkeypatch.setattr(socket, "getaddrinfo", as_the_names_say)
    listeners = listen_everywhere(host)
    assert [listener.getsockname()[0] for listener in listeners] == found
    assert len({listener.getsockname()[1] for listener in listeners}) == 1
    port = listeners[0].getsockname()[1]
    for address in ("127.0.0.1", "::1") if host == "::" else found:
        socket.create_connection((address, port), timeout=5).close()
    if len(found) == 1 and host != "::":  # a port that is taken is an error, whatever the family
        with pytest.raises(OSError, match=rf"cannot listen at {host}:{port} \({found[0]}\): Address already in use"):
            listen_everywhere(host, port)
    for listener in listeners:
        listener.close()


def test_a_name_where_nobody_can_listen_is_named():
    for host in ("no-such-name.invalid", "192.0.2.1"):
        with pytest.raises(OSError, match=rf"cannot listen at {host}:0"):
            listen_everywhere(host)
