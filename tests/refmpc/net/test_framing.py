"""Frames: large and many-parted messages, headers that are checked, and last words that arrive."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import threading
import time
from functools import partial

import numpy as np
import pytest

import refmpc
from accel import kernels
from refmpc.core.errors import OutOfStep, PeerAborted, PeerLost, PeerTimeout
from refmpc.net.certificates import make_credentials
from refmpc.net.framing import FRAME_OVERHEAD
from refmpc.net.sockets import SocketTransport
from tests.refmpc.participants import all_end, transports

KINDS = ["threads", "sockets", "unix", "tls"]
MEGABYTE = 1 << 20


@pytest.fixture(autouse=True, params=["exchanged", "prepared", "compiled"])
def prepared(request, monkeypatch):
    """Everything once more as rounds of a recorded step, whose buffers and headers are made beforehand, in Python and
    (plain sockets) by the compiled kernel, whose work Python finishes if it could not."""

    def in_python(self, operation, sends, receives, code=0):
        self.prepare(operation, sends, receives)(code)

    def compiled(self, operation, sends, receives, code=0):
        round_ = self.prepare(operation, sends, receives)
        kernel, arguments = round_.compiled(code - 5, 1, np.array([5], dtype=np.uint64)) or (lambda: 0, [])
        if kernel(*arguments) != kernels.round_is_done:
            round_(code)

    if request.param != "exchanged":
        monkeypatch.setattr(SocketTransport, "exchange", in_python if request.param == "prepared" else compiled)


@pytest.fixture(params=KINDS)
def links(request, tmp_path):
    """Three connected transports; closed afterwards."""
    yield from connected(request.param, tmp_path)


@pytest.fixture(params=["sockets", "unix", "tls"])
def socket_links(request, tmp_path):
    yield from connected(request.param, tmp_path)


def connected(kind, tmp_path):
    credentials = make_credentials([0, 1, 2], tmp_path) if kind == "tls" else None
    found = transports(kind, credentials=credentials, directory=tmp_path if kind == "unix" else None)
    yield found
    all_end({peer: transport.close for peer, transport in found.items()})


@pytest.fixture
def pair():
    """Makes two transports over one socket pair with small buffers; also the sockets."""
    with contextlib.ExitStack() as open_sockets:

        def make(timeout=2.0):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                near = open_sockets.enter_context(socket.create_connection(listener.getsockname()))
                far = open_sockets.enter_context(listener.accept()[0])
            return SocketTransport({1: near}, timeout), SocketTransport({0: far}, timeout), near, far

        yield make


def exchange_all(links, size, parts=1):
    """Every party sends ``parts`` arrays to both others and checks what it receives."""

    def work(me):
        def play():
            others = [peer for peer in links if peer != me]
            sends = {peer: [np.full(size, 10 * me + peer, np.uint8) for _ in range(parts)] for peer in others}
            receives = {peer: [np.zeros(size, np.uint8) for _ in range(parts)] for peer in others}
            links[me].exchange("everything", sends, receives)
            for peer, arrays in receives.items():
                assert all((array == 10 * peer + me).all() for array in arrays)
            return links[me].bytes_sent, links[me].frames_sent

        return play

    return all_end({me: work(me) for me in links})


def test_large_messages_both_ways_between_all_pairs_do_not_deadlock(links):
    assert exchange_all(links, 8 * MEGABYTE) == dict.fromkeys(links, (16 * MEGABYTE, 2))


def big_exchange(party, megabytes):
    """64 MB each way between all pairs at once, in the middle of an ordinary program."""
    mine = np.full(megabytes << 17, party.id, np.uint64)
    got = {peer: np.zeros_like(mine) for peer in (party.next, party.previous)}
    party._exchange("big", {key: [mine] for key in got}, {peer: [array] for peer, array in got.items()})
    return all((array == peer).all() for peer, array in got.items())


@pytest.mark.parametrize(("tls", "megabytes"), [(False, 64), (True, 16)])
def test_processes_exchange_large_messages_at_once(tls, megabytes):
    result = refmpc.run(big_exchange, [megabytes] * 3, parties="processes", tls=tls, timeout=20)
    assert result.outputs == [True, True, True]
    assert result.bytes == 6 * megabytes * MEGABYTE


def test_a_round_of_many_small_parts_arrives_whole(links):
    assert exchange_all(links, 13, parts=1000) == dict.fromkeys(links, (26_000, 2))


def test_parts_of_mixed_sizes_and_types_arrive_in_order(links):
    rng = np.random.default_rng(1)
    sizes = [0, 1, 70_000, 3, 0, 16_384, 16_383, *[5] * 100, 300_000]
    parts = [rng.integers(0, 256, size, np.uint8) for size in sizes] + [np.float64(2.5) * np.ones((2, 3)), np.array(7)]
    got = [np.empty_like(part) for part in parts]
    all_end(
        {
            0: lambda: links[0].exchange("mixed", {1: parts}, {}),
            1: lambda: links[1].exchange("mixed", {}, {0: got}),
        }
    )
    assert all((a == b).all() for a, b in zip(parts, got, strict=True))


def test_a_message_may_be_divided_differently_at_the_two_ends(links):
    sent = [np.arange(8, dtype=np.uint8), np.array([9], np.uint8)]
    got = [np.zeros(1, np.uint8), np.zeros(8, np.uint8)]
    all_end({0: lambda: links[0].exchange("x", {1: sent}, {}), 1: lambda: links[1].exchange("x", {}, {0: got})})
    assert np.concatenate(got).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9]


def test_payloads_are_received_into_the_array_itself_and_only_contiguous_ones_are_taken(pair):
    near, far, *_ = pair()
    target = np.zeros((4, 4), np.uint64)
    near.exchange("x", {1: [np.ones(4, np.uint64)]}, {})
    far.exchange("x", {}, {0: [target[1]]})
    assert target.sum() == 4
    with pytest.raises(ValueError, match="not contiguous"):
        far.exchange("x", {}, {0: [target[:, 1]]})


def test_a_party_out_of_step_is_named_with_both_operations(links):
    word = [np.zeros(1, np.uint64)]
    outcomes = all_end(
        {
            0: lambda: links[0].exchange("multiply", {1: word}, {1: [np.zeros(1, np.uint64)]}),
            1: lambda: links[1].exchange("truncate", {0: word}, {0: [np.zeros(1, np.uint64)]}),
        }
    )
    assert isinstance(outcomes[0], OutOfStep)
    assert "server-1 is out of step: it sent message 1 of 'truncate'" in str(outcomes[0])
    assert "this party expects message 1 of 'multiply'" in str(outcomes[0])
    assert "server-0 is out of step: it sent message 1 of 'multiply'" in str(outcomes[1])


def test_a_message_of_the_wrong_length_is_named_with_both_sizes(links):
    outcomes = all_end(
        {
            0: lambda: links[0].exchange("multiply", {1: [np.zeros(3, np.uint64)]}, {}),
            1: lambda: links[1].exchange("multiply", {}, {0: [np.zeros(4, np.uint64)]}),
        }
    )
    assert isinstance(outcomes[1], OutOfStep)
    assert "server-0 sent 24 bytes in 'multiply' (message 1), this party expects 32" in str(outcomes[1])


def test_a_message_that_is_too_long_is_named_as_well(links):
    outcomes = all_end(
        {
            0: lambda: links[0].exchange("multiply", {1: [np.zeros(5, np.uint64)]}, {}),
            1: lambda: links[1].exchange("multiply", {}, {0: [np.zeros(4, np.uint64)]}),
        }
    )
    assert "server-0 sent 40 bytes in 'multiply' (message 1), this party expects 32" in str(outcomes[1])


def test_what_went_at_once_is_not_sent_again_when_another_frame_takes_longer(links):
    """Two rounds: a frame too many in the first would be taken for one of the second."""
    sizes = {(0, 1): 8, (0, 2): 8 * MEGABYTE, (1, 0): 16, (1, 2): 24, (2, 0): 4 * MEGABYTE, (2, 1): 32}

    def work(me):
        def play():
            for turn in range(2):
                sends = {to: [np.full(n, 10 * me + turn, np.uint8)] for (by, to), n in sizes.items() if by == me}
                receives = {by: [np.zeros(n, np.uint8)] for (by, to), n in sizes.items() if to == me}
                links[me].exchange(f"turn {turn}", sends, receives)
                assert all((part == 10 * by + turn).all() for by, (part,) in receives.items())
            return links[me].frames_sent

        return play

    assert all_end({me: work(me) for me in links}) == dict.fromkeys(links, 4)


def test_a_repeated_or_dropped_message_is_noticed(links):
    word = [np.zeros(1, np.uint64)]

    def forgetful():
        links[0].count_sent(1, 0)
        links[0].exchange("multiply", {1: word}, {})

    outcomes = all_end({0: forgetful, 1: lambda: links[1].exchange("multiply", {}, {0: [np.zeros(1, np.uint64)]})})
    assert "it sent message 2 of 'multiply', this party expects message 1" in str(outcomes[1])


def test_a_peer_that_ended_its_program_is_out_of_step_not_dead(links):
    links[0].close()
    outcome = all_end({1: lambda: links[1].exchange("reveal", {}, {0: [np.zeros(1, np.uint64)]})})[1]
    assert isinstance(outcome, OutOfStep)
    assert "server-0 has ended its program after 0 messages, this party expects message 1 of 'reveal'" in str(outcome)


def test_a_silent_peer_is_named_with_the_operation_after_the_time_out(links):
    begun = time.monotonic()
    outcome = all_end({1: lambda: links[1].exchange("reveal", {}, {2: [np.zeros(1, np.uint64)]})})[1]
    assert isinstance(outcome, PeerTimeout)
    assert "server-2 (message 1) sent nothing in 'reveal' for 0.5 s" in str(outcome)
    assert 0.5 <= time.monotonic() - begun < 5.0


def test_whoever_waits_for_a_waiting_party_names_the_one_that_is_silent(links):
    """2 is silent; 0 waits for 2, and 1 waits for 0 just as long: both must name 2."""
    outcomes = all_end(
        {
            0: lambda: links[0].exchange("multiply", {}, {2: [np.zeros(1, np.uint64)]}),
            1: lambda: links[1].exchange("multiply", {}, {0: [np.zeros(1, np.uint64)]}),
        }
    )
    assert isinstance(outcomes[0], PeerTimeout)
    assert isinstance(outcomes[1], PeerAborted)
    assert "server-0 gave up while this party was in 'multiply': server-2 (message 1) sent nothing" in str(outcomes[1])


def test_an_abort_reaches_all_peers_with_its_reason(links):
    links[2].abort("ValueError")
    outcomes = all_end(
        {me: partial(links[me].exchange, "multiply", {}, {2: [np.zeros(1, np.uint64)]}) for me in (0, 1)}
    )
    for outcome in outcomes.values():
        assert isinstance(outcome, PeerAborted)
        assert str(outcome) == "server-2 gave up while this party was in 'multiply': ValueError"


def test_control_characters_in_a_reason_are_not_shown(links):
    links[2].abort("\x1b[31mred\nnext")
    outcome = all_end({0: lambda: links[0].exchange("x", {}, {2: [np.zeros(1)]})})[0]
    assert str(outcome).endswith("?[31mred?next")


def test_a_participant_that_is_not_there_is_refused_by_name(links):
    with pytest.raises(ValueError, match=r"client 'nobody' takes no part in this run; .* server-1, server-2"):
        links[0].exchange("x", {"nobody": [np.zeros(1)]}, {})


# sockets only -----------------------------------------------------------------------------------


def test_an_abort_in_the_middle_of_a_large_frame_is_read_as_an_abort(socket_links):
    """1 is half-way in a frame to 0, which reads only later, when it gives up: its words must follow the frame."""
    links = socket_links
    large = np.zeros(24 * MEGABYTE, np.uint8)

    def gives_up():
        try:
            links[1].exchange("large", {0: [large]}, {2: [np.zeros(1)]})
        except PeerTimeout as error:
            links[1].close()
            return str(error)

    def reads_late():
        time.sleep(0.55)
        links[0].exchange("large", {}, {1: [np.empty_like(large)]})
        links[0].exchange("next", {}, {1: [np.zeros(1)]})

    outcomes = all_end({1: gives_up, 0: reads_late})
    assert "server-2 (message 1) sent nothing" in outcomes[1]
    assert isinstance(outcomes[0], PeerAborted)
    assert "server-2 (message 1) sent nothing in 'large'" in str(outcomes[0])


def test_a_peer_that_gave_up_is_heard_while_a_large_frame_is_sent_to_it(socket_links):
    """The reason stands behind an ordinary frame that was not read yet, and the sender only notices a broken pipe."""
    links = socket_links

    def gives_up():
        links[1].exchange("small", {0: [np.zeros(1000)]}, {})
        links[1].abort("its own reasons")
        for connection in links[1]._connections.values():
            connection.close()  # at once: the large frame meets a closed door

    def sends():
        time.sleep(0.3)
        for _ in range(3):
            links[0].exchange("large", {1: [np.zeros(24 * MEGABYTE, np.uint8)]}, {})

    outcome = all_end({1: gives_up, 0: sends})[0]
    assert isinstance(outcome, PeerAborted)
    assert "its own reasons" in str(outcome)


def test_the_last_message_of_a_party_that_has_ended_is_not_lost(socket_links):
    """0 sends its last frame and ends; 1 has sent something 0 never reads, and reads late. A plain close would reset
    the connection and destroy what 1 has not read."""
    links = socket_links
    last = np.arange(3 * MEGABYTE, dtype=np.uint8)
    got = np.empty_like(last)

    def ends():
        time.sleep(0.2)
        links[0].exchange("last", {1: [last]}, {})
        links[0].close()

    def slow():
        links[1].exchange("surplus", {0: [np.zeros(100)]}, {})
        time.sleep(0.8)
        links[1].exchange("last", {}, {0: [got]})
        with pytest.raises(OutOfStep, match="has ended its program"):
            links[1].exchange("more", {}, {0: [np.zeros(1)]})

    outcomes = all_end({0: ends, 1: slow})
    assert outcomes == {0: None, 1: None}, outcomes[1]
    assert (got == last).all()


def test_a_party_that_ends_does_not_wait_for_slow_peers(socket_links):
    begun = time.monotonic()
    socket_links[0].close()
    assert time.monotonic() - begun < 0.5


def test_a_connection_that_breaks_inside_a_frame_is_a_lost_peer(pair):
    near, far, _, raw = pair()
    raw.setblocking(True)
    far.exchange("x", {0: [np.zeros(1)]}, {})
    near.exchange("x", {}, {1: [np.zeros(1)]})
    raw.sendall(far._header(0, "x", [np.zeros(100)])[:30])
    raw.close()
    with pytest.raises(PeerLost, match=r"server-1 closed the connection in 'x' \(message 2\): it died or was killed"):
        near.exchange("x", {}, {1: [np.zeros(100)]})


def test_a_header_that_trickles_in_byte_by_byte_is_understood(pair):
    near, far, _, raw = pair()
    raw.setblocking(True)
    payload = np.arange(5, dtype=np.uint64)
    frame = far._header(0, "x", [payload]) + payload.tobytes()
    assert len(frame) == FRAME_OVERHEAD + 40

    def trickle():
        for i in range(len(frame)):
            raw.sendall(frame[i : i + 1])
            time.sleep(0.002)

    got = np.zeros(5, np.uint64)
    all_end({"far": trickle, "near": lambda: near.exchange("x", {}, {1: [got]})})
    assert got.tolist() == [0, 1, 2, 3, 4]


def test_a_slow_link_that_moves_is_not_a_time_out(pair):
    """A message that takes longer than the time-out in all, but never pauses that long, is no hang."""
    near, far, _, raw = pair(timeout=0.5)
    raw.setblocking(True)
    payload = np.arange(100, dtype=np.uint8)
    frame = far._header(0, "x", [payload]) + payload.tobytes()

    def slow():
        for i in range(0, len(frame), 20):
            raw.sendall(frame[i : i + 20])
            time.sleep(0.15)

    got = np.zeros(100, np.uint8)
    outcomes = all_end({"far": slow, "near": lambda: near.exchange("x", {}, {1: [got]})})
    assert outcomes["near"] is None
    assert (got == payload).all()


def test_signals_do_not_disturb_an_exchange(pair):
    near, far, *_ = pair()
    data = np.arange(4 * MEGABYTE, dtype=np.uint8)
    got = np.empty_like(data)
    rings = []
    before = signal.signal(signal.SIGALRM, lambda *_: rings.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    slow = threading.Timer(0.1, lambda: far.exchange("x", {0: [data]}, {}))
    try:
        slow.start()
        near.exchange("x", {}, {1: [got]})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    slow.join()
    assert rings
    assert (got == data).all()


def test_a_peer_that_reads_nothing_is_named(pair):
    near, _far, *_ = pair(timeout=0.5)
    with pytest.raises(PeerTimeout, match=r"server-1 \(message 1\) took no message in 'x' for 0.5 s"):
        near.exchange("x", {1: [np.zeros(64 * MEGABYTE, np.uint8)]}, {})


def test_tls_links_speak_version_1_3_and_present_certificates(tmp_path):
    links = transports("tls", credentials=make_credentials([0, 1, 2], tmp_path))
    for transport in links.values():
        for connection in transport._connections.values():
            assert isinstance(connection, ssl.SSLSocket)
            assert connection.version() == "TLSv1.3"
            assert connection.getpeercert(binary_form=True)
        transport.close()
