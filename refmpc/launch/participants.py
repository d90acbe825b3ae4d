"""One participant of a run: what it plays, and how its failure is told."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from refmpc.core.errors import OutOfStep, PartyFailed, PeerAborted, PeerLost, PeerTimeout
from refmpc.core.ledger import Ledger
from refmpc.core.party import Party
from refmpc.net.emulation import NetworkProfile
from refmpc.net.framing import Peer, Transport, title
from refmpc.primitives.io import Client

__all__ = [
    "LATER",
    "Options",
    "Outcomes",
    "explain",
    "hanging",
    "keep_freed_memory",
    "play_client",
    "play_party",
    "traceback_text",
]

LATER = 3.0  # seconds after the time-out in which a party whose peers failed must have ended
Outcomes = tuple[dict[Peer, Any], dict[Peer, tuple[BaseException, str]]]


@dataclass(frozen=True)
class Options:
    """What every participant of a run needs to know; public."""

    timeout: float
    profile: NetworkProfile
    run_id: str = field(repr=False)
    parameters: Mapping[str, Any]
    releases: Mapping[str, str]
    insecure_seed: int | None
    insecure_check_ranges: bool
    insecure_record: bool


def play_party(
    id: int,
    transport: Transport,
    program: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: Options,
    report: Callable[[Any], None],
) -> tuple[Any, Ledger, Any]:
    """Run a program at one party that is connected; returns its output, its ledger and its transcript."""
    try:
        party = Party(
            id,
            transport,
            parameters=options.parameters,
            run_id=options.run_id.encode(),
            report=report,
            insecure_seed=options.insecure_seed,
            insecure_check_ranges=options.insecure_check_ranges,
            insecure_record=options.insecure_record,
        )
        party.declare(options.releases)
        with np.errstate(over="ignore"):  # the ring wraps around by design; numpy warns for single elements
            output = program(party, *arguments)
            if inspect.iscoroutine(output):
                output = party.complete(output)
        return output, party.ledger, party.transcript
    except BaseException as error:
        transport.abort(_public_reason(error))
        raise


def play_client(name: str, transport: Transport, program: Callable[..., Any], argument: Any) -> tuple[Any, None, None]:
    """Run a program at one client that is connected, as ``play_party`` at a party."""
    try:
        return program(Client(name, transport), argument), None, None
    except BaseException as error:
        transport.abort(_public_reason(error))
        raise


def _public_reason(error: BaseException) -> str:
    """What peers may learn of an error: its kind, and its text only if it comes from the library itself, since the
    text of a program's own error may quote private values."""
    if type(error) in (PeerTimeout, PeerLost, PeerAborted, OutOfStep):
        return str(error)
    return type(error).__name__


_FORMATTING = threading.Lock()


def traceback_text() -> str:
    """The traceback of the error that is being handled.

    One thread at a time: Python parses the failing lines to mark columns in them, and its parser counts its depth for
    all threads together. When three parties failed at once it could raise "AST constructor recursion depth mismatch"
    instead.
    """
    with _FORMATTING:
        return traceback.format_exc()


def explain(failures: Mapping[Peer, tuple[BaseException, str]]) -> PartyFailed:
    """One exception for the caller: the root cause first, that is one not caused by another party's end."""

    def rank(peer: Peer) -> tuple[int, str]:
        # the later, the more of an echo; one that did not end may have had nothing to do with a peer that died
        echoes = (_DidNotEnd, PeerTimeout, PeerLost, PeerAborted)
        return next((i for i, kind in enumerate(echoes, 1) if isinstance(failures[peer][0], kind)), 0), str(peer)

    order = sorted(failures, key=rank)
    first = order[0]
    error, text = failures[first]
    kind = PartyFailed if isinstance(error, PartyFailed) else type(error)
    lines = [f"{title(first)} failed: {kind.__name__}: {error}"]
    lines += [f"{title(peer)} ended too: {failures[peer][0]}" for peer in order[1:]]
    explained = PartyFailed("\n".join(lines), f"Traceback of {title(first)}:\n{text}")
    explained.tracebacks = {peer: failures[peer][1] for peer in order}
    explained.__cause__ = error
    return explained


class _DidNotEnd(PartyFailed):
    """A participant that was still running when the time of the others was over."""


def hanging() -> tuple[BaseException, str]:
    return _DidNotEnd(
        "it did not end when the others had: it hangs, is stopped or was still computing"
    ), "(no traceback: it did not end)"


def keep_freed_memory() -> None:
    """Let the C library keep freed blocks for reuse (glibc): large temporary arrays then cost no page faults."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
