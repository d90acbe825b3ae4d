"""The door of a live server: strangers of all kinds are refused and logged, and participants get in all the while."""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import secrets
import select
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, seed, settings
from hypothesis import strategies as st

from accel.prg import KEY_BYTES
from protocols.federation.read import FederationConfig, load
from protocols.log import Log
from protocols.net import wire
from protocols.net.credentials import load_credentials
from protocols.net.listener import GUESTS, Door
from protocols.net.wire import Channel, Identity, Refused, call
from protocols.run.hosts.server import Server
from refmpc.core.errors import PeerLost, RefmpcError
from refmpc.net.admission import STRANGERS
from refmpc.net.rendezvous import listen
from refmpc.net.tls import LENGTH, secure
from tests.protocols.run.hosts.federations import make_federation, rekey
from tests.refmpc.listener_attacks import Attack, attacks, perform

PATIENCE = 1.5


class Besieged:
    """Server 0's door, with one handler that echoes; everything that knocks may be tried on it."""

    def __init__(self, config: FederationConfig, directory: Path, unpinned: str | None = None):
        self.config = config
        self._log = directory / "door.log"
        credentials = load_credentials(config, "server-0")
        pinned = {peer: pin for peer, pin in credentials.pinned.items() if peer != unpinned}
        identity = Identity(config, 0, replace(credentials, pinned=pinned))
        listener = listen(*config.addresses[0])
        handlers = {"echo": self._echo}
        self.door = Door(identity, [listener], handlers, Log("server-0", self._log), timeout=5.0, patience=PATIENCE)

    def _echo(self, channel: Channel, hello: Any) -> None:
        channel.answer(ok=True)
        while True:
            message, payload = channel.receive(limit=1000)
            channel.send(message, [payload])

    @property
    def address(self) -> tuple[str, int]:
        return self.config.addresses[0]

    def identity(self, name: str, **changes: Any) -> Identity:
        return Identity(self.config, name, load_credentials(self.config, name))

    def greet(self, name: str = "bank") -> float:
        """A participant calls and is answered; seconds it took."""
        begun = time.monotonic()
        channel, _ = call(self.identity(name), 0, self.address, "echo", timeout=10.0)
        with channel:
            channel.send({"word": 1}, [b"payload"])
            assert channel.receive(limit=7) == ({"word": 1}, bytearray(b"payload"))
        return time.monotonic() - begun

    def reasons(self) -> list[str]:
        events = [json.loads(line) for line in self._log.read_text().splitlines()]
        return [event.get("reason", "") for event in events]

    def wait_for_reason(self, words: str) -> None:
        until = time.monotonic() + 5
        while not any(words in reason for reason in self.reasons()):
            assert time.monotonic() < until, (words, self.reasons())
            time.sleep(0.02)


@pytest.fixture
def besieged(tmp_path: Path) -> Iterator[Besieged]:
    server = Besieged(make_federation(tmp_path), tmp_path)
    with server.door:
        yield server


@pytest.mark.parametrize("name", ["bank", "server-0"])
def test_a_trusted_certificate_that_belongs_to_no_caller_is_refused(tmp_path: Path, name: str) -> None:
    """TLS alone would let them in: a certificate whose pin was taken out of the file, and the server's own,
    reflected."""
    server = Besieged(make_federation(tmp_path), tmp_path, unpinned="bank")
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    own = load_credentials(server.config, name)
    bare.load_cert_chain(own.certificate, own.key)
    with server.door, bare.wrap_socket(socket.create_connection(server.address)) as connection:
        connection.settimeout(5.0)
        hello = json.dumps({"purpose": "echo"}).encode()
        connection.sendall(LENGTH.pack(len(hello)) + hello)
        assert b"this certificate is not pinned here" in connection.recv(1000)
        server.wait_for_reason("this certificate is not pinned here")


def test_a_crowd_that_says_nothing_keeps_no_participant_out(besieged: Besieged) -> None:
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(2 * STRANGERS):
            stack.enter_context(socket.create_connection(besieged.address))
        assert besieged.greet() < PATIENCE
        assert threading.active_count() <= threads + 2 * STRANGERS + 2
    besieged.wait_for_reason("too many callers have not said who they are")


def test_whoever_trickles_is_sent_away_after_a_while(besieged: Besieged) -> None:
    """Slow-loris: a byte now and then, before TLS and, with a stolen certificate, inside it."""
    plain = socket.create_connection(besieged.address)
    stolen = secure(
        socket.create_connection(besieged.address), besieged.identity("bank").credentials, server_side=False
    )
    stolen.do_handshake()
    begun = time.monotonic()
    open_ = {"plain": plain, "stolen": stolen}
    while open_ and time.monotonic() - begun < 3 * PATIENCE:
        for name, connection in list(open_.items()):
            try:
                connection.settimeout(0.05)
                connection.sendall(b"\x16" if name == "plain" else b"\0")
                if connection.recv(100) == b"":
                    raise ConnectionResetError
            except TimeoutError:
                pass
            except OSError:
                del open_[name]
                connection.close()
        time.sleep(0.05)
    assert not open_ and time.monotonic() - begun < PATIENCE + 2
    assert besieged.greet() < PATIENCE


@pytest.mark.parametrize(
    ("days", "says"), [(-1, "is not valid before 20"), (40, "expired on 20")], ids=["early", "late"]
)
@pytest.mark.parametrize("whose", ["bank", "server-0"])
def test_a_clock_that_differs_is_named_and_the_caller_may_come_again(
    tmp_path: Path, whose: str, days: int, says: str
) -> None:
    """A server whose clock was five hours off ended its clients with SSLV3_ALERT_BAD_CERTIFICATE. Here it is the
    certificate that is a day too young, or ten too old, which looks the same."""
    make_federation(tmp_path)
    server = Besieged(rekey(tmp_path, whose, days=30, age=days), tmp_path)
    other = {"bank": "server-0", "server-0": "bank"}[whose]
    with (
        server.door,
        pytest.raises(Refused, match=f"certificate of {whose} {says}.*the clock of {other} says 20") as refused,
    ):
        server.greet()
    assert refused.value.later


def test_oversized_messages_are_refused_before_they_are_read(besieged: Besieged) -> None:
    bank = besieged.identity("bank")
    with secure(socket.create_connection(besieged.address), bank.credentials, server_side=False) as connection:
        connection.do_handshake()
        connection.sendall(struct.pack("<I", 2**31))  # a first message of 2 GB
        assert connection.recv(100) == b""
    besieged.wait_for_reason("greeting of 2147483648 bytes")
    channel, _ = call(bank, 0, besieged.address, "echo", timeout=5.0)
    with channel:
        channel.connection.sendall(struct.pack("<IQ", 2, 2**40) + b"{}")  # a payload of a terabyte
        with pytest.raises(PeerLost):
            channel.receive()
    besieged.wait_for_reason("1099511627776 bytes")
    assert besieged.greet() < PATIENCE


def test_a_participant_may_not_take_all_places(besieged: Besieged) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(GUESTS):
            stack.enter_context(call(besieged.identity("bank"), 0, besieged.address, "echo", timeout=5.0)[0])
        with pytest.raises(Refused, match="connections already") as refused:
            call(besieged.identity("bank"), 0, besieged.address, "echo", timeout=5.0)
        assert refused.value.later
        besieged.greet("card")


def test_nobody_comes_in_behind_a_door_that_was_closed(besieged: Besieged, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller who was still at the door when it closed would be kept by a server that has ended, which never says
    so."""
    objection = Identity.objection

    def slow(identity: Identity, *rest: Any) -> str:
        closing = threading.Thread(target=besieged.door.close)
        closing.start()
        closing.join()
        return objection(identity, *rest)

    monkeypatch.setattr(Identity, "objection", slow)
    with pytest.raises(Refused, match="this server is stopping") as refused:
        call(besieged.identity("bank"), 0, besieged.address, "echo", timeout=5.0)
    assert refused.value.later


def test_certificates_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    config = make_federation(tmp_path)
    expired = rekey(tmp_path, "bank", days=30, age=90)  # pinned, but not valid any more
    assert expired.addresses == config.addresses
    server = Besieged(expired, tmp_path)
    with server.door:
        # the file is right, the key is right; only its time is over
        with pytest.raises(Refused, match="(?i)expired"):
            call(server.identity("bank"), 0, server.address, "echo", timeout=5.0)
        server.wait_for_reason("expired")
        server.greet("card")
        with pytest.raises(Refused, match="bank has name|card has name bank"):
            stolen = Identity(expired, "bank", load_credentials(expired, "card"))
            call(stolen, 0, server.address, "echo", timeout=5.0)
        with pytest.raises(Refused, match="takes no calls for 'party'"):
            call(server.identity("card"), 0, server.address, "party", timeout=5.0)


def test_a_server_with_another_certificate_is_not_trusted_by_its_callers(tmp_path: Path) -> None:
    """The caller checks as well: server 1's certificate at server 0's address."""
    config = make_federation(tmp_path)
    identity = Identity(config, 1, load_credentials(config, "server-1"))
    log = Log("server-1", tmp_path / "log")
    with (
        Door(identity, [listen(*config.addresses[0])], {}, log, timeout=5.0),
        pytest.raises(Refused, match="pinned for it"),
    ):
        bank = Identity(config, "bank", load_credentials(config, "bank"))
        call(bank, 0, config.addresses[0], "upload", timeout=5.0)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    directory = tmp_path_factory.mktemp("fuzzed")
    server = Besieged(make_federation(directory), directory)
    with server.door:
        yield server


def _hello(**fields: Any) -> bytes:
    words = json.dumps(fields).encode()
    return struct.pack("<I", len(words)) + words


RIGHT = {"version": wire.VERSION, "from": "bank", "to": "server-0", "purpose": "echo"}


@settings(max_examples=60)
@given(attacks())
@example(Attack("participant", (_hello(**RIGHT, configuration=["x"] * 100),), 0.0, "answer"))
@example(Attack("participant", (_hello(**{**RIGHT, "purpose": {"a": 1}}),), 0.0, "answer"))
@example(Attack("participant", (_hello(purpose="doctor"), b"\xff" * 500), 0.0, "answer"))
def test_nothing_that_arrives_closes_the_door(fuzzed: Besieged, attack: Attack) -> None:
    stolen = fuzzed.identity("bank").credentials
    staying = perform(attack, fuzzed.address, stolen)
    try:
        assert fuzzed.greet("card") < 3.0
    finally:
        for connection in staying:
            connection.close()


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=200), max_size=5))
@example([struct.pack("<IQ", 2, 0) + b"{}", struct.pack("<IQ", 4, 0) + b"null"])
def test_frames_of_a_broken_participant_end_its_call_only(fuzzed: Besieged, pieces: list[bytes]) -> None:
    channel, _ = call(fuzzed.identity("bank"), 0, fuzzed.address, "echo", timeout=1.0)
    with channel, contextlib.suppress(OSError):
        for piece in pieces:
            channel.connection.sendall(piece)
    assert fuzzed.greet("card") < 3.0


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_two_minutes_of_garbage_leave_a_server_as_it_was(tmp_path: Path) -> None:
    """A real server process: it stays up, its memory, threads and descriptors stay where they were, it answers."""
    config = make_federation(tmp_path)
    command = ["server", "--as", "server-0", "--config", tmp_path / "federation.toml", "--log", tmp_path / "log"]
    process = subprocess.Popen([sys.executable, "-m", "protocols.deploy", *map(str, command)])
    try:
        address = config.addresses[0]
        bank = Identity(config, "bank", load_credentials(config, "bank"))
        _until_it_answers(bank, address)
        _fuzz(address, bank, 30.0, 0)
        before = _resources(process.pid)
        count = _fuzz(address, bank, 90.0, 10**6)
        time.sleep(6.0)  # the patience of the door
        after = _resources(process.pid)
        assert process.poll() is None and count > 100
        _until_it_answers(bank, address)
    finally:
        process.kill()
        process.wait()
    print(f"{count} attacks; memory, threads, descriptors {before} then {after}")
    assert after[0] < before[0] + 16_000_000 and after[1] <= before[1] + 2 and after[2] <= before[2] + 4


def _until_it_answers(bank: Identity, address: tuple[str, int]) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            call(bank, 0, address, "result", timeout=5.0)
        except Refused as error:
            assert "knows nothing of session" in str(error)
            return
        except RefmpcError:
            assert time.monotonic() < until
            time.sleep(0.2)


def _resources(pid: int) -> tuple[int, int, int]:
    """Bytes of memory, threads and descriptors of a process."""
    folder = Path(f"/proc/{pid}")
    pages = int((folder / "statm").read_text().split()[1])
    return pages * resource.getpagesize(), len(list((folder / "task").iterdir())), len(list((folder / "fd").iterdir()))


def _fuzz(address: tuple[str, int], bank: Identity, seconds: float, first: int) -> int:
    until, done = time.monotonic() + seconds, 0
    staying: list[socket.socket] = []
    for number in itertools.count(first):

        @seed(number)
        @settings(max_examples=50)
        @given(attacks())
        def attack_once(attack: Attack) -> None:
            nonlocal done
            if not done or time.monotonic() < until:  # on a busy machine, one
                staying.extend(perform(attack, address, bank.credentials))
                done += 1

        attack_once()
        for connection in staying[:-50]:
            connection.close()
        del staying[:-50]
        if time.monotonic() >= until:
            break
    for connection in staying:
        connection.close()
    return done


# a whole server, asked by a participant that does not follow the protocol ------------------------


def test_a_client_that_breaks_the_rules_of_an_upload_is_refused_and_nothing_is_kept(tmp_path: Path) -> None:
    config = make_federation(tmp_path)
    identity = Identity(config, 0, load_credentials(config, "server-0"))
    server = Server(identity, tmp_path / "state", Log("server-0", tmp_path / "log"), host="127.0.0.1")
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    bank = Identity(config, "bank", load_credentials(config, "bank"))
    facts = {"kind": "training", "session": secrets.token_hex(16), "rows": 200, "output": None, "people": "0" * 64}

    def upload(**changes: Any) -> tuple[Channel, dict[str, Any]]:
        return call(bank, 0, config.addresses[0], "upload", timeout=5.0, **{**facts, **changes})

    for changes, words in (
        ({"kind": "destroy"}, "kind"),
        ({"kind": ["x"]}, "kind"),
        ({"session": "../../etc"}, "session"),
        ({"rows": 10**12}, "rows"),
        ({"rows": True}, "rows"),
        ({"kind": "prediction", "output": "label"}, "no predictions"),
        ({"output": "label"}, "output"),
        ({"rows": 0}, "rows"),
    ):
        with pytest.raises(Refused, match=words):
            upload(**changes)
    token = secrets.token_hex(16)
    for message in (
        {"message": 5, "operation": "input_from_client", "token": token},  # out of order
        {"from": 7},
        {"from": "x"},
        {"complete": 1, "digest": "x"},
        {},
    ):
        channel, answer = upload()
        assert answer["kept"] == 0
        with channel, pytest.raises(RefmpcError):
            channel.send(message, [bytes(100)])
            channel.receive()
    channel, _ = upload()
    with channel:
        channel.send({"message": 0, "operation": "input_from_client", "token": token}, [bytes(2 * KEY_BYTES)])
        assert channel.receive()[0] == {"kept": 1}
        # a second call of the same client ends the first, and finds what was kept
        again, answer = upload()
        with again:
            assert answer["kept"] == 1 and not answer["complete"]
            with pytest.raises(PeerLost):
                channel.receive()
    with pytest.raises(Refused, match="as another client says"):
        upload(rows=300)
    server.stop.set()
    thread.join(10)
    assert not thread.is_alive()


def test_the_configuration_must_be_the_same(besieged: Besieged, tmp_path: Path) -> None:
    text = (tmp_path / "federation.toml").read_text()
    (tmp_path / "other.toml").write_text(text.replace("epsilon = 3.0", "epsilon = 8.0"))
    other = load(tmp_path / "other.toml")
    with pytest.raises(Refused, match="configuration hash .* both must use the same federation.toml"):
        call(Identity(other, "bank", load_credentials(other, "bank")), 0, besieged.address, "echo", timeout=5.0)


def test_plain_tcp_and_old_tls_are_not_spoken(besieged: Besieged) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(besieged.address) as raw, pytest.raises(ssl.SSLError, match="(?i)version"):
        context.wrap_socket(raw)
    besieged.greet()


def test_a_server_that_stops_with_callers_in_its_queue_may_be_called_again(
    besieged: Besieged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is reset between the call and its TLS layer, where Python itself looks at the socket."""
    listener = socket.create_server(("127.0.0.1", 0))

    def stop(connection: socket.socket) -> None:
        listener.close()
        until_reset = select.poll()
        until_reset.register(connection)
        assert until_reset.poll(5000)  # the reset is here, and nobody has read it

    monkeypatch.setattr(wire, "notice_silence", stop)
    with pytest.raises(PeerLost, match="the connection broke before the TLS handshake"):
        call(besieged.identity("bank"), 0, listener.getsockname(), "echo", timeout=5.0)


@pytest.mark.parametrize("moment", ["set_socket_options", "wrong_pin"])
def test_a_connection_that_breaks_at_any_moment_may_be_called_again(
    besieged: Besieged, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Whatever looks at a socket that was reset raises an error of the system, which ended the client."""

    def reset(*_: Any) -> None:
        raise ConnectionResetError("reset by the peer")

    monkeypatch.setattr(wire, moment, reset)
    with pytest.raises(PeerLost, match="the connection to server-0 broke: reset by the peer"):
        call(besieged.identity("bank"), 0, besieged.address, "echo", timeout=5.0)


def test_both_ends_of_a_call_notice_a_host_that_is_gone(besieged: Besieged) -> None:
    """Keepalive on every channel: whoever only listens would wait for a crashed host for good."""
    kept: list[Channel] = []
    arrived = threading.Event()

    def keep(channel: Channel, hello: Any) -> None:
        channel.answer(ok=True)
        kept.append(channel)
        arrived.set()
        channel.receive()

    besieged.door._handlers["stay"] = keep
    channel, _ = call(besieged.identity("bank"), 0, besieged.address, "stay", timeout=5.0)
    with channel:
        assert arrived.wait(5)
        for end in (channel, kept[0]):
            assert end.connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle = end.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            assert idle <= 30
            unanswered = end.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert 0 < unanswered <= 60_000  # keepalive says nothing while something was sent and not acknowledged
