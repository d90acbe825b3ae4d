"""A small read-only page at a server: ``/`` for people, ``/status.json``, ``/metrics`` for Prometheus, ``/healthz``.

It listens on loopback unless it is told otherwise. Whoever does not come from this host, or under another name than
this host's, needs the token in ``status.token`` (made at the first start, mode 0600, in the server's state), as
``Authorization: Bearer …`` or ``?token=…``. Nothing can be changed through it: only GET is answered, and no body is
read.
"""

from __future__ import annotations

import contextlib
import hmac
import html
import ipaddress
import json
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from accel.files import write_bytes
from protocols.run.hosts.status import COVERED, StatusSource, metrics_text

__all__ = ["StatusPage", "duration", "page_html"]

TOKEN = "status.token"
_AT_A_TIME = 8  # threads; more callers are sent away before they get one
_BUSY = b"HTTP/1.0 503 try again\r\nRetry-After: 1\r\nCache-Control: no-store\r\nContent-Length: 0\r\n\r\n"
_LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}


class StatusPage:
    """Answers until closed, each caller in a thread, at most a few at a time."""

    def __init__(self, address: tuple[str, int], source: StatusSource, state: Path):
        self._token = _token(state / TOKEN)
        places = threading.BoundedSemaphore(_AT_A_TIME)
        page = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0
            server_version, sys_version = "ppvfl", ""

            def do_GET(self) -> None:
                with contextlib.suppress(OSError, ValueError):  # ValueError: a path or Host that is no address
                    page.answer(self, source)

            def log_message(self, *words: Any) -> None:
                """Nothing: a monitor that asks every few seconds would fill the log."""

        class Listener(ThreadingHTTPServer):
            daemon_threads = True

            def process_request(self, request: Any, client_address: Any) -> None:
                if places.acquire(blocking=False):
                    super().process_request(request, client_address)
                    return
                with contextlib.suppress(
                    OSError
                ):  # no thread for it: who holds a place gives it back within the time-out
                    request.settimeout(0.1)
                    request.sendall(_BUSY)
                self.shutdown_request(request)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    places.release()

            def handle_error(self, *words: Any) -> None:
                """Nothing: what strangers send, or leave half sent, is not worth a line each."""

            address_family = ThreadingHTTPServer.address_family if ":" not in address[0] else 10

        self._listener = Listener(address, Handler)
        self.address: tuple[str, int] = self._listener.server_address[:2]  # type: ignore[assignment]
        self._thread = threading.Thread(target=self._listener.serve_forever, daemon=True, name="status page")
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler, source: StatusSource) -> None:
        """One request."""
        url = urlsplit(request.path)
        if not self._may_see(request, url.query):
            self._send(request, 401, "text/plain", "give the token of status.token: Authorization: Bearer …\n")
        elif url.path == "/healthz":
            healthy = source.is_healthy
            self._send(request, 200 if healthy else 503, "text/plain", "ok\n" if healthy else "no sign of life\n")
        elif url.path == "/metrics":
            self._send(request, 200, "text/plain; version=0.0.4", metrics_text(source.facts()))
        elif url.path == "/status.json":
            self._send(request, 200, "application/json", json.dumps(source.facts(errors=True), indent=1))
        elif url.path == "/":
            self._send(request, 200, "text/html", page_html(source.facts(errors=True)))
        else:
            self._send(request, 404, "text/plain", "there is /, /status.json, /metrics and /healthz\n")

    def _may_see(self, request: BaseHTTPRequestHandler, query: str) -> bool:
        host = urlsplit(f"//{request.headers.get('Host', '')}").hostname or ""
        if ipaddress.ip_address(request.client_address[0]).is_loopback and host in _LOCAL_NAMES:
            return True  # a page of elsewhere that names this address (rebinding) has another Host
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        given = given or parse_qs(query).get("token", [""])[0]
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _send(self, request: BaseHTTPRequestHandler, code: int, kind: str, text: str) -> None:
        body = text.encode()
        request.send_response(code)
        request.send_header("Content-Type", kind if "charset" in kind else f"{kind}; charset=utf-8")
        request.send_header("Content-Length", str(len(body)))
        request.send_header("Cache-Control", "no-store")
        request.send_header("X-Content-Type-Options", "nosniff")
        request.send_header("Referrer-Policy", "no-referrer")
        request.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        request.end_headers()
        request.wfile.write(body)


def _token(file: Path) -> str:
    if not file.exists():
        write_bytes(file, secrets.token_urlsafe(32).encode(), private=True)
    return file.read_text().strip()


# the page ----------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --small: #57606a; --line: #d0d7de;
  --bad: #b42318; --good: #1a7f37; --page: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --small: #9198a1; --line: #3d444d; --bad: #ff7b72; --good: #3fb950; --page: #0d1117; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: var(--text);
  background: var(--page); overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin-bottom: .2rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; vertical-align: top; }
th, td { border-bottom: 1px solid var(--line); } th { font-weight: 600; } .facts th { width: 11rem; }
.list th, .list td { overflow-wrap: normal; } .list td:last-child { overflow-wrap: anywhere; }
.small { color: var(--small); font-size: .85rem; } .bad { color: var(--bad); } .good { color: var(--good); }
progress { width: 12rem; max-width: 100%; height: .9rem; display: block; margin: .25rem 0; }
svg { width: 100%; max-width: 30rem; height: auto; display: block; }
polyline { fill: none; stroke: var(--good); stroke-width: 2; }
svg line { stroke: var(--line); } svg text { fill: var(--small); font-size: 11px; }
@media (max-width: 40rem) {
  body { margin: 1rem auto; } .facts th { width: 7rem; }
  .list tr:first-child { display: none; } .list, .list tbody, .list tr, .list td { display: block; width: 100%; }
  .list tr { border-bottom: 1px solid var(--line); padding: .3rem 0; } .list td { border: 0; padding: .1rem 0; }
  .list td::before { content: attr(data-name) ": "; color: var(--small); } }
"""


def page_html(facts: Mapping[str, Any]) -> str:
    """The facts for people. Loads nothing, runs nothing, and asks again every five seconds."""
    name = html.escape(f"{facts['server']} of {facts['federation']}")
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width, "
        f"initial-scale=1'>"
        f"<meta http-equiv=refresh content=5><title>{name}</title>",
        f"<style>{_STYLE}</style><h1>{name}</h1>",
        f"<p class=small>ppvfl {html.escape(facts['version'])}, configuration {html.escape(facts['configuration'])}, "
        f"since "
        f"{_cell(facts['started'])}, {facts['free_bytes'] / 1e9:,.1f} GB free</p>",
        _section("Waiting for", "waits", ("whom", "since", "why"), facts["waits"], "<p class=good>nobody</p>"),
    ]
    for session in facts["sessions"]:
        parts.append(_session(session))
    if not facts["sessions"]:
        parts.append("<h2>Trainings</h2><p>none yet: no client has called</p>")
    spent = [
        {
            "client": entry["client"],
            "people": entry["people"],
            "ε spent": "unbounded" if entry["epsilon"] is None else f"{entry['epsilon']:.4g}",
            "limit": "none" if entry["limit"] is None else f"{entry['limit']:g}",
            "δ": f"{entry['delta']:g}",
            "runs": entry["runs"],
        }
        for entry in facts["budget"]
    ]
    parts.append(_section("Privacy budget", "budget", ("client", "people", "ε spent", "limit", "δ", "runs"), spent, ""))
    errors = list(reversed(facts.get("errors", [])))
    nothing = "<p class=good>none</p>"
    parts.append(_section("Last warnings and errors", "errors", ("time", "level", "event", "facts"), errors, nothing))
    return "".join(parts) + "</html>"


def _session(session: Mapping[str, Any]) -> str:
    rows = [("state", session["state"]), ("rows", f"{session['rows']:,}")]
    rows.append(("clients", ", ".join(session["here"]) or "none yet"))
    if session["missing"]:
        rows.append(("waited for", ", ".join(session["missing"])))
    bar = ""
    if session["total"]:
        bar = f"<progress value={int(session['done'])} max={int(session['total'])}></progress> "
        rows.append((str(session["phase"]), f"{session['done']:,} of {session['total']:,}"))
    if session["rate"]:
        left = "" if session["seconds_left"] is None else f", {duration(session['seconds_left'])} left"
        rows.append(("pace", f"{session['rate']:.3g} a second{left}"))
    if session["rounds"] is not None:
        rows.append(("rounds and bytes sent", f"{session['rounds']:,}; {session['bytes_sent'] / 1e6:,.2f} MB"))
    for release in session["releases"]:
        times = "" if release["times"] == 1 else f" ({release['times']:,} times)"
        rows.append(("opened", f"{release['name']}, to {release['to']}{times}"))
    if session["claim"]:
        rows.append(("claim", session["claim"]))
    if session["failed"]:
        rows.append(("failed", session["failed"]))
    cells = "".join(
        f"<tr><th>{html.escape(key)}<td{' class=bad' if key == 'failed' else ''}>"
        f"{bar if key == session['phase'] else ''}{html.escape(str(value))}"
        for key, value in rows
    )
    title = html.escape(f"{session['kind'].capitalize()} {session['name']}")
    why = "; ".join(COVERED[part] for part in ("sessions", "traffic", "releases"))
    drawn = _curve(session["curve"])
    return f"<h2>{title}</h2><table class=facts>{cells}</table><p class=small>{html.escape(why)}</p>{drawn}"


def _curve(points: Sequence[Sequence[float]]) -> str:
    """Accuracy on public rows after each epoch, as a drawing; nothing if there are none."""
    if not points:
        return ""
    first, last = points[0][0], points[-1][0]
    width, height, left, top = 440, 130, 45, 10  # of the field, and where it begins
    low, high = (round(edge(point[1] for point in points), 3) for edge in (min, max))
    low, high = (low, high) if high > low else (low - 0.005, high + 0.005)
    line = " ".join(
        f"{left + width * (epoch - first) / max(1, last - first):.1f},"
        f"{top + height * (high - right) / (high - low):.1f}"
        for epoch, right, _ in points
    )
    bottom = top + height
    words = f"Accuracy on the public rows: {points[-1][1]:.1%} after epoch {int(last)}"
    return (
        f"<p>{words}</p><svg viewBox='0 0 500 165' role=img aria-label='{words}'><line x1={left} y1={bottom} "
        f"x2={left + width} "
        f"y2={bottom} /><line x1={left} y1={top} x2={left} y2={bottom} /><text x=0 y={top + 4}>{high:.1%}</text>"
        f"<text x=0 y={bottom + 4}>{low:.1%}</text><text x={left} y={bottom + 18}>epoch {int(first)}</text>"
        f"<text x={left + width} y={bottom + 18} text-anchor=end>{int(last)}</text><polyline points='{line}' /></svg>"
        f"<p class=small>{html.escape(COVERED['curve'])}</p>"
    )


def _section(title: str, part: str, columns: tuple[str, ...], rows: Sequence[Mapping[str, Any]], nothing: str) -> str:
    head = "".join(f"<th>{html.escape(name)}" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td data-name='{html.escape(name)}'>{_cell(row.get(name, ''))}" for name in columns)
        for row in rows
    )
    table = f"<table class=list><tr>{head}{body}</table>" if rows else nothing or "<p>nothing</p>"
    return f"<h2>{html.escape(title)}</h2>{table}<p class=small>{html.escape(COVERED[part])}</p>"


def _cell(value: Any) -> str:
    """A value for people: facts as "name value, …", times without their zone, which is UTC."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{name} {found}" for name, found in value.items())
    text = html.escape(str(value))
    return re.sub(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?(?:Z|\+00:00)$", r"\1 \2 UTC", text)


def duration(seconds: int) -> str:
    """For people: hours and minutes, minutes and seconds, or seconds."""
    hours, rest = divmod(int(seconds), 3600)
    if hours:
        return f"{hours} h {rest // 60} min"
    return f"{rest // 60} min {rest % 60} s" if rest >= 60 else f"{rest} s"
