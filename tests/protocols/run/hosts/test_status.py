"""The window for people: ``ppvfl status``, the page, metrics and health, on servers that train; and who may look."""

from __future__ import annotations

import http.client
import json
import re
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocols.cli import main
from protocols.run.hosts.page import TOKEN, duration
from protocols.run.hosts.status import COVERED
from tests.protocols.run.hosts.threads import ROWS, Federation, _wait

SAMPLE = re.compile(r'ppvfl_[a-z_]+\{([a-z]+="(?:[^"\\]|\\.)*",?)*\} [0-9.e+-]+')


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    found = Federation(tmp_path, timeout=10.0)
    for number in range(3):
        found.start(number, status=number == 0, predictions=True)  # stays when it has trained
    yield found
    found.stop()


def get(federation: Federation, path: str, **headers: str) -> tuple[int, str]:
    page = federation.servers[0][0].page
    assert page is not None
    connection = http.client.HTTPConnection(*page.address, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.headers["Cache-Control"] == "no-store"
    connection.close()
    return answer.status, text


def trained(federation: Federation) -> None:
    federation.client("bank").join(0.1)
    _wait(lambda: "waiting for card" in federation.servers[0][0]._state_in_words())
    _, text = get(federation, "/")
    assert "Waiting for" in text and re.search(
        r"<td data-name='whom'>card<td data-name='since'>20\d\d-\S+ \S+ UTC", text
    )
    federation.train("card")


def test_status_page_metrics_and_health_of_a_training(
    federation: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(federation)
    code, text = get(federation, "/status.json")
    facts = json.loads(text)
    (session,) = facts["sessions"]
    assert code == 200 and session["state"].startswith("done") and session["rows"] == ROWS
    assert session["here"] == ["bank", "card"] and session["rounds"] > 20 and session["bytes_sent"] > 0
    assert {"fault in the upload of bank", "fault in the upload of card", "global model"} <= {
        release["name"] for release in session["releases"]
    }
    assert [entry["runs"] for entry in facts["budget"]] == [1, 1]
    shown = get(federation, "/")[1]
    assert "ε = 3" in shown and all(words in shown for words in (COVERED["traffic"], COVERED["budget"]))
    assert "<script" not in shown and "http:" not in shown and "https:" not in shown  # loads nothing
    code, text = get(federation, "/metrics")
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert code == 200 and all(SAMPLE.fullmatch(line) for line in samples), samples
    assert any(line.startswith('ppvfl_epsilon_spent{client="bank"} 3') for line in samples)
    assert get(federation, "/healthz") == (200, "ok\n")
    assert get(federation, "/etc/passwd")[0] == 404
    assert main(["status", "--as", "bank", "--config", federation.config.source]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "server-2" in table and "spent on card" in table and "rounds" in table
    federation.end(2)
    assert main(["status", "--as", "card", "--config", federation.config.source, "--json"]) == 1
    assert "unreachable" in json.loads(capsys.readouterr().out)["server-2"]


def test_who_may_look_and_that_nothing_can_be_changed(federation: Federation) -> None:
    assert get(federation, "/", Host="attacker.example")[0] == 401  # a page elsewhere that resolves to this address
    (token,) = (federation.directory / "server-0" / "state").glob(f"*/{TOKEN}")
    assert token.stat().st_mode & 0o077 == 0
    assert get(federation, "/", Host="server.example", Authorization=f"Bearer {token.read_text()}")[0] == 200
    assert get(federation, f"/healthz?token={token.read_text()}", Host="server.example")[0] == 200
    assert get(federation, "/healthz?token=wrong", Host="server.example")[0] == 401
    page = federation.servers[0][0].page
    assert page is not None
    for method in ("POST", "PUT", "DELETE"):
        connection = http.client.HTTPConnection(*page.address, timeout=10)
        connection.request(method, "/")
        assert connection.getresponse().status == 501
        connection.close()


def test_what_is_no_request_is_not_worth_a_line(federation: Federation, capsys: pytest.CaptureFixture[str]) -> None:
    page = federation.servers[0][0].page
    assert page is not None
    garbage = [b"GET //[ HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: [::1\r\n\r\n", b"\x16\x03\x01\r\n\r\n", b""]
    for words in garbage:
        with socket.create_connection(page.address, timeout=10) as stranger:
            if not words:  # it is reset in the middle of its request
                stranger.sendall(b"GET / HT")
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                continue
            stranger.sendall(words)
            while stranger.recv(4096):
                pass
    assert get(federation, "/healthz") == (200, "ok\n")
    _wait(lambda: not any("process_request" in thread.name for thread in threading.enumerate()))
    assert "Traceback" not in capsys.readouterr().err


def test_the_learning_curve_on_public_rows_is_drawn_while_there_is_one(federation: Federation) -> None:
    trained(federation)
    assert "<svg" not in get(federation, "/")[1]  # no public rows
    session = federation.servers[0][0]._store.training
    assert session is not None
    session.curve = [[1, 0.5, 0.9], [2, 0.75, 0.6], [3, 0.7, 0.5]]
    shown = get(federation, "/")[1]
    assert "70.0% after epoch 3" in shown and COVERED["curve"] in shown
    (line,) = re.findall(r"<polyline points='([^']*)'", shown)
    heights = [float(point.split(",")[1]) for point in line.split()]
    assert len(heights) == 3 and heights[1] < heights[2] < heights[0]  # upwards is better
    assert json.loads(get(federation, "/status.json")[1])["sessions"][0]["curve"] == session.curve
    session.curve = [[1, 0.5, 0.9]]  # one point is no line, and no error
    assert "50.0% after epoch 1" in get(federation, "/")[1]


@pytest.mark.parametrize(
    ("seconds", "words"), [(4, "4 s"), (64, "1 min 4 s"), (3600, "1 h 0 min"), (90061, "25 h 1 min")]
)
def test_durations_for_people(seconds: int, words: str) -> None:
    assert duration(seconds) == words


def test_a_server_that_hangs_is_not_healthy(federation: Federation) -> None:
    source = federation.servers[0][0].status
    assert source.is_healthy
    source._quiet = 0.0
    _wait(lambda: get(federation, "/healthz") == (503, "no sign of life\n"))


def test_callers_that_say_nothing_get_no_thread_each(federation: Federation) -> None:
    """Each had one for five seconds, without a bound."""
    page = federation.servers[0][0].page
    assert page is not None
    before = threading.active_count()
    silent = [socket.create_connection(page.address, timeout=5) for _ in range(60)]
    last = silent[-1]
    assert last.recv(100).startswith(b"HTTP/1.0 503 try again")  # all others have been accepted before it
    assert threading.active_count() <= before + 8 + 2
    for connection in silent:
        connection.close()
    _wait(lambda: get(federation, "/healthz") == (200, "ok\n"))


@pytest.mark.heavy
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(federation: Federation, tmp_path: Path, width: int) -> None:
    """Headless Chromium draws it, on a phone and on a screen: text that is there must be seen by a browser, not only
    sent."""
    trained(federation)
    page = federation.servers[0][0].page
    assert page is not None
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    words += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1200", "--virtual-time-budget=2000"]
    url, picture = "http://{}:{}/".format(*page.address), tmp_path / "page.png"
    try:
        dump = subprocess.run([*words, "--dump-dom", url], capture_output=True, text=True, timeout=90)
        subprocess.run([*words, f"--screenshot={picture}", url], capture_output=True, timeout=90)
    except FileNotFoundError:
        pytest.skip("no chromium on this machine")
    assert "Privacy budget" in dump.stdout and "server-0 of test" in dump.stdout
    assert "width=device-width" in dump.stdout  # else a phone shows a page of 980 pixels, made small
    size = struct.unpack(">II", picture.read_bytes()[16:24])
    assert size == (width, 1200)
