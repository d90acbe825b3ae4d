"""The listener of a participant, which admits only participants.

Each caller gets a thread and a few seconds to complete the TLS handshake and say what it wants. The number of callers
that are not yet authenticated is bounded (``refmpc.net.admission``), and so is what they may send. Garbage, port scans,
half-open connections, slow trickles and oversized messages therefore cost a thread for some seconds and a line in the
log.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from accel.errors import InvalidArgument
from protocols.log import Log
from protocols.net.answerer import PURPOSE as DOCTOR
from protocols.net.answerer import Answerer
from protocols.net.wire import (
    ALIGNMENT_CALLS,
    CALLS,
    Channel,
    Identity,
    caller_of,
    check_fields,
    earlier_in_use,
    notice_silence,
    wrong_date,
)
from protocols.state.disk import explain
from refmpc.core.errors import RefmpcError
from refmpc.net.admission import PATIENCE, STRANGERS, Admission, Caller
from refmpc.net.framing import Peer, name_of, printable
from refmpc.net.tls import (
    parse,
    receive,
    send,
    set_socket_options,
    shake_hands,
    tls_context,
    wrap_in_tls,
    wrong_pin,
)

__all__ = ["Door", "Handler"]

_FAREWELL, _FAREWELL_READS = 0.3, 16  # seconds and reads for which one who is refused may still send
GUESTS = 16  # connections that one participant may hold open

Handler = Callable[[Channel, Mapping[str, Any]], None]


class Door:
    """Answers calls until closed. ``handlers[purpose]`` gets (channel, first message) in the caller's own thread, must
    answer the first message, and returns when it is done; the channel is closed then unless the handler kept it.
    """

    def __init__(
        self,
        identity: Identity,
        listeners: Sequence[socket.socket],
        handlers: Mapping[str, Handler],
        log: Log,
        *,
        timeout: float,
        doctor: Answerer | None = None,
        patience: float = PATIENCE,
    ):
        self._identity = identity
        self._listeners = tuple(listeners)
        self._handlers = dict(handlers)
        self._log = log
        self._timeout = timeout
        self._doctor = doctor
        self._patience = patience
        self._lock = threading.Lock()
        self._admission = Admission()
        self._guests: Counter[Peer] = Counter()
        self._channels: set[Channel] = set()
        self._kept: set[Channel] = set()
        self._noted: dict[Peer, str] = {}  # earlier certificates in use, which are logged once
        self._closed = threading.Event()
        self._context = tls_context(identity.credentials, server_side=True, check_dates=False)
        for listener in self._listeners:
            listener.listen(2 * STRANGERS)  # a longer queue than usual: a crowd must not make participants wait in it
            listener.setblocking(False)
        self._thread = threading.Thread(target=self._accept, daemon=True, name="door")
        self._thread.start()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def keep(self, channel: Channel) -> None:
        """Called by a handler that hands the channel to somebody else: it stays open when the handler returns."""
        with self._lock:
            self._kept.add(channel)

    def close(self) -> None:
        """Stop listening; whoever is inside is let go."""
        self._closed.set()
        self._thread.join()
        for listener in self._listeners:
            listener.close()
        with self._lock:
            inside = list(self._channels)
        for channel in inside:
            channel.cut()

    # threads -------------------------------------------------------------------------------------

    def _accept(self) -> None:
        poll = select.poll()
        waiting = {listener.fileno(): listener for listener in self._listeners}
        for number in waiting:
            poll.register(number, select.POLLIN)
        while not self._closed.is_set():
            for number, _ in poll.poll(200):
                self._accept_one(waiting[number])

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            connection, source = listener.accept()
        except OSError as error:  # a caller that has gone again, or no file descriptor left
            if not isinstance(error, BlockingIOError | ConnectionAbortedError):
                self._log.warning("accept failed", error=str(error))
                time.sleep(0.1)
            return
        while self._admission.is_full:
            time.sleep(0.01)
        stranger = self._admission.enter(connection, str(source[0]))
        try:
            threading.Thread(target=self._answer, args=(stranger,), daemon=True, name="caller").start()
        except RuntimeError as error:  # no thread left on this machine: the caller may come again
            self._log.warning("refused a caller", caller=stranger.host, reason=str(error))
            self._admission.leave(stranger)
            connection.close()

    def _dress(self, stranger: Caller) -> ssl.SSLSocket:
        dressed = wrap_in_tls(stranger.connection, self._context, server_side=True)
        self._admission.replace(stranger, dressed)
        return dressed

    def _answer(self, stranger: Caller) -> None:
        deadline = time.monotonic() + self._patience
        address = stranger.host
        channel, handler = None, None
        try:
            stranger.connection.settimeout(self._patience)
            connection = self._dress(stranger)
            shake_hands(connection, f"a caller at {address}")
            peer = caller_of(connection, self._identity.credentials)
            if peer is None or peer == self._identity.me:
                self._refuse(connection, "this certificate is not pinned here")
            credentials = self._identity.credentials
            wrong = wrong_pin(connection, credentials, peer) or wrong_date(connection, peer, self._identity.name)
            if wrong:
                self._refuse(connection, wrong, later=True)
            if (accepted := earlier_in_use(connection, credentials, peer)) not in {"", self._noted.get(peer)}:
                self._noted[peer] = accepted
                self._log.warning("a caller uses its earlier certificate", peer=name_of(peer), accepted=accepted)
            hello = parse(receive(connection, name_of(peer), deadline), name_of(peer))
            if hello.get("purpose") == DOCTOR and self._doctor is not None:  # also if versions or files differ
                self._doctor.answer(connection, hello, address)
                return
            objection = self._identity.objection(hello, peer)
            if objection:
                # it is who it says it is: a new file or version is on its way to one of the two
                rolled_out = hello.get("from") == name_of(peer) and hello.get("to") == self._identity.name
                self._refuse(connection, objection, later=rolled_out)
            handler = self._handlers.get(purpose := str(hello.get("purpose")))
            if handler is not None and (fields := CALLS.get(purpose) or ALIGNMENT_CALLS.get(purpose)) is not None:
                try:
                    check_fields(hello, fields)
                except InvalidArgument as error:
                    self._refuse(connection, str(error))
            if handler is None:
                self._refuse(connection, f"{self._identity.name} takes no calls for {hello.get('purpose')!r}")
            channel = self._let_in(connection, peer)
            if channel is None:
                why = (
                    "this server is stopping"
                    if self._closed.is_set()
                    else f"{name_of(peer)} has {GUESTS} connections already"
                )
                self._refuse(connection, why, later=True)
        except _Unwelcome as error:
            self._log.warning("refused a caller", caller=address, reason=printable(str(error), 300))
        except Exception as error:  # whatever a stranger sends, the door stays open for the others
            why = printable(str(error) or type(error).__name__, 300)
            why = "too many callers have not said who they are" if stranger.sent_away else why
            self._log.warning("refused a caller", caller=address, reason=why)
        finally:
            self._admission.leave(stranger)
            if channel is None:
                _part(stranger.connection)
        if channel is not None and handler is not None:
            self._serve(channel, handler, hello)

    def _let_in(self, connection: socket.socket, peer: Peer) -> Channel | None:
        """The caller's channel. Nobody comes in behind ``close``, which lets go only those who are inside by then."""
        set_socket_options(connection)
        notice_silence(connection)
        channel = Channel(connection, peer, self._timeout)
        with self._lock:
            if self._closed.is_set() or self._guests[peer] >= GUESTS:
                return None
            self._guests[peer] += 1
            self._channels.add(channel)
        return channel

    def _serve(self, channel: Channel, handler: Handler, hello: Mapping[str, Any]) -> None:
        try:
            handler(channel, hello)
        except RefmpcError as error:
            if not self._closed.is_set():
                self._log.warning(
                    "a call ended", peer=name_of(channel.peer), purpose=hello["purpose"], reason=str(error)
                )
        except InvalidArgument as error:  # something that the caller has sent
            with contextlib.suppress(RefmpcError):
                channel.refuse(str(error))
            self._log.warning("a call ended", peer=name_of(channel.peer), purpose=hello["purpose"], reason=str(error))
        except Exception as error:  # of others than our own and the system's only the kind: a text may quote values
            facts = explain(error) if isinstance(error, OSError) else {}
            kind = type(error).__name__
            self._log.error("a call failed", peer=name_of(channel.peer), purpose=hello["purpose"], error=kind, **facts)
        finally:
            with self._lock:
                self._guests[channel.peer] -= 1
                self._channels.discard(channel)
                kept = channel in self._kept
                self._kept.discard(channel)
            if not kept:
                channel.close()

    def _refuse(self, connection: socket.socket, why: str, *, later: bool = False) -> NoReturn:
        with contextlib.suppress(OSError):
            send(connection, {"refused": why, "later": later}, time.monotonic() + 1.0)
        raise _Unwelcome(why)


def _part(connection: socket.socket) -> None:
    """Close so that the last words arrive: closing a socket that holds unread data would destroy what is on its way."""
    until = time.monotonic() + _FAREWELL
    with contextlib.suppress(OSError, ValueError):
        socket.socket.shutdown(connection, socket.SHUT_WR)
        for _ in range(_FAREWELL_READS):
            connection.settimeout(max(0.001, until - time.monotonic()))
            if not socket.socket.recv(connection, 1 << 16):
                break
    connection.close()


class _Unwelcome(Exception):
    """A caller that is not let in; the text is for it and for the log."""
