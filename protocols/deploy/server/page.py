"""A small read-only page at a server: ``/`` for people, ``/status.json``, ``/metrics`` for Prometheus, ``/healthz``.

It listens on loopback unless it is told otherwise. Whoever does not come from this host, or under another name than this
host's, needs the token in ``status.token`` (made at the first start, mode 0600, in the server's state), as ``Authorization: Bearer …`` or
``?token=…``. Nothing can be changed through it: only GET is answered, and no body is read.
"""

from __future__ import annotations

import contextlib
import hmac
import html
import ipaddress
import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from accel.files import write_bytes
from protocols.deploy.server.status import COVERED, StatusSource, metrics_text

__all__ = ["StatusPage", "page_html"]

TOKEN = "status.token"
_AT_A_TIME = 8
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
                with contextlib.suppress(OSError):
                    if places.acquire(blocking=False):
                        try:
                            page.answer(self, source)
                        finally:
                            places.release()
                    else:
                        self.send_error(503, "try again")

            def log_message(self, *words: Any) -> None:
                """Nothing: a monitor that asks every few seconds would fill the log."""

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
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
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1b1f24; }
h1 { font-size: 1.4rem; margin-bottom: .2rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .25rem .6rem .25rem 0; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid #d0d7de; } td { border-bottom: 1px solid #eaeef2; }
.small { color: #57606a; font-size: .85rem; } .bad { color: #b42318; } .good { color: #1a7f37; }
progress { width: 12rem; height: .9rem; }
"""


def page_html(facts: Mapping[str, Any]) -> str:
    """The facts for people. Loads nothing, runs nothing, and asks again every five seconds."""
    name = html.escape(f"{facts['server']} of {facts['federation']}")
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=5><title>{name}</title>",
        f"<style>{_STYLE}</style><h1>{name}</h1>",
        f"<p class=small>ppvfl {html.escape(facts['version'])}, configuration {html.escape(facts['configuration'])}, since "
        f"{html.escape(facts['started'])}, {facts['free_bytes'] / 1e9:,.1f} GB free</p>",
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
        left = "" if session["seconds_left"] is None else f", {_duration(session['seconds_left'])} left"
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
    return f"<h2>{title}</h2><table>{cells}</table><p class=small>{html.escape(why)}</p>"


def _section(title: str, part: str, columns: tuple[str, ...], rows: Sequence[Mapping[str, Any]], nothing: str) -> str:
    head = "".join(f"<th>{html.escape(name)}" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(row.get(name, '')))}" for name in columns) for row in rows)
    table = f"<table><tr>{head}{body}</table>" if rows else nothing or "<p>nothing</p>"
    return f"<h2>{html.escape(title)}</h2>{table}<p class=small>{html.escape(COVERED[part])}</p>"


def _duration(seconds: int) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
