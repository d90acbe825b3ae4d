"""One of the three servers: listens, takes in what clients send, trains with the two others, hands out.

Everything a server has accepted is on its disk: with the same configuration and the same state it goes on where it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import accel
from accel.errors import InvalidArgument
from accel.files import Damaged, private_folder, write_bytes
from protocols.federation.public_plan import log_claim
from protocols.federation.read import FederationConfig
from protocols.log import Log
from protocols.net.answerer import Answerer
from protocols.net.backoff import Backoff
from protocols.net.listener import Door
from protocols.net.live_channels import LiveTransport
from protocols.net.spool import SpoolTransport
from protocols.net.waiting import Waiting
from protocols.net.wire import Channel, Identity
from protocols.plan.plausibility import Impossible
from protocols.run.hosts.client_requests import Reception
from protocols.run.hosts.jobs import MakeTask, TrainingTask, make_task
from protocols.run.hosts.page import StatusPage
from protocols.run.hosts.server_sync import DONE, READY, Different, Meeting, Met
from protocols.run.hosts.sessions import Session, SessionStore
from protocols.run.hosts.status import StatusSource
from protocols.run.progress import ProgressBars
from protocols.run.warm_up import forget_earlier, warm_up, warm_up_everything
from protocols.server.gl_training import GREETING
from protocols.server.verification import UploadRefused
from protocols.state.audit_log import WITNESS, AuditLog
from protocols.state.budget import Budgets
from protocols.state.checkpoint import CannotResume
from protocols.state.commitment import ColumnsChanged
from protocols.state.disk import explain
from refmpc import Ledger, Party
from refmpc.core.errors import HandshakeError, PeerAborted, RefmpcError
from refmpc.launch.participants import Options, keep_freed_memory, play_party
from refmpc.net.emulation import PROFILES
from refmpc.net.framing import name_of
from refmpc.net.rendezvous import listen_everywhere
from refmpc.net.sockets import SocketTransport
from vfl.dp.budget import BudgetExceededError

__all__ = ["Server", "load_kernels"]

_LOG_EVERY = 10.0  # seconds between two lines of progress in the log


def load_kernels(config: FederationConfig, state: Path, log: Log, ready: threading.Event) -> None:
    """Load, or compile, what the training will need while clients read and align their rows: before the servers meet,
    so that no attempt waits for it. ``ready`` is set at its end; if it failed, they are loaded when they are needed."""
    begun = time.monotonic()
    try:
        private_folder(state)
        forget_earlier(state)
        if not accel.is_compiled():
            reason = "nothing is compiled on this machine: `ppvfl warm` does it at the installation"
            log.info("compiling kernels, about a minute", reason=reason)
        if config.run.layers is None:
            warm_up(config.run.training, len(config.run.classes) or 1, state)
        else:
            warm_up_everything(state)
        log.info("kernels are loaded", seconds=round(time.monotonic() - begun, 2))
    except Exception as error:  # of no importance to the training
        log.warning("kernels were not loaded ahead", reason=type(error).__name__)
    finally:
        ready.set()


class Server:
    """One server: its door, its sessions, its meetings with the two others."""

    def __init__(
        self,
        identity: Identity,
        state: Path,
        log: Log,
        *,
        host: str,
        predictions: bool = False,
        make: MakeTask = make_task,
    ):
        self._predictions = predictions
        self._identity, self._log = identity, log
        self.config: FederationConfig = identity.config
        self._directory = directory = identity.kept_in(state)
        self._budgets = Budgets(state, self.config)
        self._store = SessionStore(self.config, directory, predictions=predictions, say=log.info, make=make)
        self._audit = AuditLog(directory / "audit.jsonl")  # also keeps a second process out of this directory
        self._waiting = Waiting(log)
        self._meeting = Meeting(identity, log, self._audit, self._waiting)
        self._pause = Backoff(0.5, 60.0)  # after an attempt that failed
        self._next_look = 0.0  # for sessions that are to be forgotten
        self.stop, self.ready = threading.Event(), threading.Event()
        self.ready.set()  # cleared while kernels are loaded: it meets nobody meanwhile
        self.status = StatusSource(
            self.config, identity.name, directory, self._store, self._waiting, self._budgets, self._log
        )
        self.page: StatusPage | None = None
        entry = self.config.servers[int(str(identity.me))]
        self._listeners = listen_everywhere(host, entry.port)

    def show_status(self, address: tuple[str, int], *, required: bool = True) -> None:
        """A page for people and monitors at ``address``; if it is not ``required``, a port that is taken is only
        logged."""
        try:
            self.page = StatusPage(address, self.status, self._directory)
        except OSError as error:
            if required:
                raise
            self._log.warning("no status page", address=f"{address[0]}:{address[1]}", **explain(error))

    def serve(self) -> int:
        """Until there is nothing left to do, or ``stop`` is set."""
        keep_freed_memory()
        number = int(str(self._identity.me))
        reception = Reception(
            self.config,
            number,
            self._store,
            self._audit,
            self._log,
            lambda channel: self._door.keep(channel),
            self.stop,
        )
        addresses = [listener.getsockname()[:2] for listener in self._listeners]
        handlers = {
            "upload": reception.take_upload,
            "live": reception.take_in,
            "result": reception.hand_out,
            "taken": reception.note_taken,
            "party": self._let_server_in,
            "wake": self._wake,
            "status": self._tell_status,
        }
        begun = self._store.training
        doctor = Answerer(
            self.config,
            self._identity.credentials,
            self._identity.name,
            state=self._state_in_words,
            directory=self._directory,
            budget=lambda: [asdict(spent) for spent in self._budgets.spent()],
        )
        timeout = self.config.run.timeout
        with Door(self._identity, self._listeners, handlers, self._log, timeout=timeout, doctor=doctor) as self._door:
            self._log.info(
                "listening",
                address=" and ".join(f"{host}:{port}" for host, port in addresses),
                configuration=self._identity.configuration[:16],
                protocol=self.config.run.protocol,
                resumes=None if begun is None else begun.name[:8],
                status=None if self.page is None else "http://{}:{}/".format(*self.page.address),
            )
            while not self._over():
                self.status.tick()
                try:
                    self._forget_older()
                    if self._wait_for_work():
                        self._meet_and_compute()
                except OSError as error:  # of this server's own disk, most likely full: it can go on when there is room
                    self._log.error("this server cannot go on for now", **explain(error))
                    self.stop.wait(self._pause.next_pause())
            self._log.info("stopped" if self.stop.is_set() else "finished: every client has the model")
        self._meeting.close()
        if self.page is not None:
            self.page.close()
        try:
            self._audit.append("stopped" if self.stop.is_set() else "finished")
        except OSError as error:  # the work is done, or will be taken up again: a record less does not make it fail
            self._log.error("the audit log lacks its last record", **explain(error))
        self._audit.close()
        return 0

    def _state_in_words(self) -> str:
        """For doctors: public facts only."""
        training = self._store.training
        if not self.ready.is_set():
            return "compiles or loads its kernels"
        if plans := self._store.planning:
            return plans
        if waits := self._waiting.words:
            return waits
        if training is None:
            return "waits for clients"
        if training.done:
            return "has trained"
        progress = training.progress
        return f"{progress['phase']} {progress['done']} of {progress['total']}" if progress else "waits for servers"

    # the main thread -----------------------------------------------------------------------------

    def _forget_older(self) -> None:
        """Once an hour: what [run] retention_days says."""
        days = self.config.run.retention_days
        if days and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + 3600.0
            for name in self._store.forget_older(days):
                self._audit.append("session forgotten", session=name, days=days)
                self._log.info("a session is forgotten", session=name[:8], days=days)

    def _over(self) -> bool:
        """Asked to stop, or nothing left to do."""
        training = self._store.training
        return self.stop.is_set() or (
            not self._predictions and training is not None and training.done and training.taken
        )

    def _wait_for_work(self) -> bool:
        self._name_missing()
        with self._store.changed:
            if self.ready.is_set() and READY in self._offers().values():
                return True
            self._store.changed.wait(0.2)
        return self.ready.is_set() and self._meeting.somebody_waits and bool(self._offers())

    def _name_missing(self) -> None:
        """Without all clients nothing is computed: say who is waited for, and since when."""
        training = self._store.training
        missing = [] if training is None or training.done else training.missing
        doing = (
            "it must be there during the training" if training and training.task.live else "its upload is not complete"
        )
        for client in self.config.clients:
            if client.name in missing:
                self._waiting.on(client.name, doing)
            else:
                self._waiting.over(client.name)

    def _offers(self) -> dict[str, str]:
        """What this server can compute, or (DONE) compute once more with a server that died before it had."""
        offered = [session for session in self._store if session.complete and not session.failed]
        return {session.name: DONE if session.done else READY for session in offered}

    def _compared(self, name: str) -> dict[str, Any]:
        """What the three servers must agree on before they compute a session: also that nobody's budget is exceeded."""
        session, budget = self._store[name], ""
        try:
            people = session.people
            if isinstance(session.task, TrainingTask) and not session.done:
                budget = self._budgets.objection(name, session.task.plan.claim, people)
        except InvalidArgument as error:  # a file of this server is damaged
            session.fail(f"{self._identity.name}: {error}", try_again=True)
            raise HandshakeError(session.failed) from None
        return {**session.parameters(), "people": people, "budget": budget}

    def _meet_and_compute(self) -> None:
        try:
            met = self._meeting.hold(self._offers, self._compared, self._over)
        except Different as error:  # nothing was computed: clients may begin another one
            self._store[error.session].failed = str(error)
            self._log.error("the servers cannot compute this session together", reason=str(error))
            self._audit.append("session failed", session=error.session)
            return
        if met is None:
            return
        session = self._store[met.session]
        for peer, (head, count) in met.heads.items():
            self._audit.append(WITNESS, peer=name_of(peer), head=head, count=count)
        facts = {"kind": session.kind, "rows": session.facts["rows"]}
        uploads = {"uploads": {client: spool.digest for client, spool in session.spools.items()}}
        more = {} if session.task.live else uploads
        self._audit.append("attempt", **facts, session=session.name, attempt=met.attempt, **more)
        self._log.info("all servers agree", **facts, session=session.name[:8], attempt=met.attempt[:8])
        if isinstance(session.task, TrainingTask):
            log_claim(self._log, session.task.plan.claim)
        try:
            if isinstance(session.task, TrainingTask):
                self._budgets.charge(session.name, session.task.plan.claim, session.people)
                self._audit.append("charged", session=session.name, spent=[s.words for s in self._budgets.spent()])
            session.computing = True
            self._attempt(session, met)
        except BudgetExceededError as error:  # at all three: they have compared
            session.fail(str(error), opened_nothing=not session.has_opened)
            self._audit.append("session failed", session=session.name, reason="budget")
            self._log.error("the budget of a client would be exceeded", reason=str(error))
            for connection in met.connections.values():
                connection.close()
        # it would release something twice, or what was opened cannot be: nobody computes until an operator has acted
        except (CannotResume, Impossible, Damaged) as error:
            reason = f"{self._identity.name}: {error}" if isinstance(error, Damaged) else str(error)
            if not session.done:  # a server that is done goes on handing out what it has
                session.fail(reason, try_again=True)
            self._audit.append("session failed", session=session.name)
            self._log.error("this training must not go on", reason=reason)
        except UploadRefused as error:  # all three servers know
            if session.has_opened:  # in a later step of GL-BMF: what was released before is spent
                way_out = "What was released until then counts; change [federation] name everywhere to begin a new run"
            else:  # the bit on the uploads is all that was opened, and clients may begin another one
                way_out = "When it is mended, start all clients with --align-again"
                self._budgets.refund(session.name)
            session.fail(f"{error}. {way_out}", opened_nothing=not session.has_opened)
            self._audit.append("session failed", session=session.name, refused=list(error.clients))
            self._log.error("an upload is refused", clients=", ".join(error.clients), reason=str(error))
        except (RefmpcError, ColumnsChanged) as error:
            self._failed(met, error, {"reason": str(error)})
        except OSError as error:  # of this server's own disk, most likely full: it can go on when there is room
            self._failed(met, error, explain(error))
        else:
            self._pause.reset()
        finally:
            session.computing = False
            session.guests.let_go()
        with self._store.changed:
            self._store.changed.notify_all()
        session.guests.notify()

    def _failed(self, met: Met, error: Exception, facts: Mapping[str, str]) -> None:
        """Nothing is lost: the servers meet again, after a pause that grows while nothing succeeds."""
        with contextlib.suppress(OSError):  # a full disk must not end the server
            self._audit.append("attempt failed", attempt=met.attempt, reason=type(error).__name__)
        pause = self._pause.next_pause()
        self._log.warning("the attempt failed, the servers will meet again", pause=round(pause, 1), **facts)
        self.stop.wait(pause)

    def _transport(self, session: Session, met: Met) -> SpoolTransport | LiveTransport:
        """The servers' connections, and the clients: what they have sent before, or they themselves."""
        timeout = self.config.run.timeout
        if not session.task.live:
            return SpoolTransport(SocketTransport(met.connections, timeout), session.spools)
        try:
            clients = session.guests.gather(met.attempt)
        except RefmpcError as error:
            servers = SocketTransport(met.connections, timeout)
            servers.abort(str(error))
            servers.close()
            raise
        return LiveTransport({**met.connections, **clients}, timeout)

    def _attempt(self, session: Session, met: Met) -> None:
        task, timeout = session.task, self.config.run.timeout
        options = Options(
            timeout=timeout,
            profile=PROFILES["loopback"],  # emulates nothing
            run_id=f"{self._identity.configuration} {session.name} {met.attempt}",
            parameters=session.parameters(),
            releases=task.plan.releases,
            insecure_seed=None,
            insecure_check_ranges=False,
            insecure_record=False,
        )
        transport = self._transport(session, met)
        begun = time.monotonic()
        ledgers: list[Ledger] = []

        async def program(party: Party, directory: Path) -> Any:
            ledgers.append(party.ledger)  # also if it fails: what was opened stays opened
            session.ledger = party.ledger
            return await task.run(party, directory)

        with ProgressBars(Console(stderr=True), quiet=not self._log.is_terminal) as show:
            try:
                output, ledger, _ = play_party(
                    int(str(self._identity.me)),
                    transport,
                    program,
                    (session.directory,),
                    options,
                    self._reporter(session, met.attempt, show),
                )
                self._keep(session, output, ledger)
                session.finish(met.attempt, transport.outbox)
                self._settle(session, transport)
            except BaseException:
                if task.opens_in_every_step and ledgers:
                    self._note_releases("release before a failure", session, met.attempt, ledgers[0])
                raise
            finally:
                transport.close()
                session.progress = {} if task.live else session.progress
        self._note_releases("release", session, met.attempt, ledger)
        total = ledger.total()
        self._log.info(
            "computed and released",
            kind=session.kind,
            session=session.name[:8],
            rows=session.facts["rows"],
            rounds=total.rounds,
            bytes_sent=total.bytes_sent,
            seconds=round(time.monotonic() - begun, 2),
        )

    def _settle(self, session: Session, transport: SpoolTransport | LiveTransport) -> None:
        """Hear from both others that they have their results too: then nobody needs this server's shares and noise
        again, even if a client never comes for its result. Otherwise they stay until every client has come. 1 round."""
        others = [peer for peer in range(3) if peer != self._identity.me]
        token = np.zeros(1, dtype=np.uint8)
        try:
            transport.exchange("done", {peer: [token] for peer in others}, {peer: [token.copy()] for peer in others})
        except RefmpcError as error:
            self._log.warning("shares and noise stay until every client has its result", reason=str(error))
        else:
            session.settle()

    def _note_releases(self, event: str, session: Session, attempt: str, ledger: Ledger) -> None:
        """One record for each release and receiver; with how many times, where something is released in every step."""
        counts = Counter((r.name, r.elements, r.receiver, r.claim) for r in ledger.releases)
        for (name, elements, receiver, claim), times in counts.items():
            facts = {"name": name, "elements": elements, "receiver": receiver}
            facts |= {"claim": hashlib.sha256(claim.encode()).hexdigest()}
            facts |= {"times": times} if session.task.opens_in_every_step else {}
            self._audit.append(event, session=session.name, attempt=attempt, **facts)

    def _reporter(self, session: Session, attempt: str, show: Callable[[Any, Any], None]) -> Callable[[Any], None]:
        logged, begun = 0.0, set[str]()

        def report(message: dict[str, Any]) -> None:
            nonlocal logged
            if self.stop.is_set():
                raise PeerAborted("this server was asked to stop")
            self.status.tick()
            session.pace.report(message["phase"], message["done"], message["total"])
            session.progress = {"phase": message["phase"], "done": message["done"], "total": message["total"]}
            session.curve = message.get("curve", session.curve)
            if message["phase"] == GREETING:  # all steps before this one have been released, in earlier attempts
                self._audit.append("training begins", session=session.name, attempt=attempt, step=message["done"])
                self._log.info("training begins", step=message["done"], of=message["total"])
            show(0, message)
            self._pause.reset()
            if (
                message["phase"] not in begun or time.monotonic() - logged > _LOG_EVERY
            ):  # of a short run, too, there is a line
                begun.add(message["phase"])
                logged = time.monotonic()
                self._log.info("progress", **session.progress)

        return report

    def _keep(self, session: Session, output: Any, ledger: Ledger) -> None:
        """What was released, its claim and its ledger, for this server's operator."""
        write_bytes(session.directory / "claim.txt", session.task.claim.encode() + b"\n", private=True)
        write_bytes(session.directory / "ledger.json", ledger.to_json().encode(), private=True)
        session.task.keep(session.directory, output)

    # callers, each in a thread of its own --------------------------------------------------------

    def _let_server_in(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        if not isinstance(channel.peer, int) or channel.peer < int(str(self._identity.me)):
            channel.answer(refused=f"{name_of(channel.peer)} has no business here: servers call lower numbers only")
            raise HandshakeError("not a server that calls this one")
        if not self.ready.is_set():
            channel.answer(
                refused=f"{self._identity.name} compiles or loads its kernels, and comes when it has", later=True
            )
            return
        channel.answer(ok=True)
        self._door.keep(channel)
        self._meeting.arrive(channel)
        with self._store.changed:
            self._store.changed.notify_all()

    def _tell_status(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        channel.answer(ok=True)
        channel.send(self.status.facts())

    def _wake(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        channel.answer(ok=True)
        if isinstance(channel.peer, int):
            self._meeting.wake()
            with self._store.changed:
                self._store.changed.notify_all()
