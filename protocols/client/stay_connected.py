"""A client of GL-BMF in a deployment: it stays with the three servers while they train, and comes back when anything
breaks.

What it must not lose lies in its ``--state``: its layers and how many gradients it has applied
(``protocols.client.gl_client``). The servers keep each release before they open it, so whoever died is sent the same
one again.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from accel.files import private_folder
from accel.validate import require
from protocols.client.columns import OwnColumns
from protocols.client.gl_client import LayerClientJob, TrainedClient, client_program, receive_end
from protocols.client.people import people_tag
from protocols.federation.public_plan import local_update, starting_layers
from protocols.log import Log
from protocols.net.backoff import Backoff
from protocols.net.live_channels import HANDOVER
from protocols.net.server_calls import SERVERS, Beat, ServerCalls
from protocols.net.wire import TRAINING, Identity
from protocols.plan.gl_plan import LayerPlan
from protocols.state.commitment import ColumnsChanged
from refmpc import Client
from refmpc.core.errors import OutOfStep, PeerAborted, PeerLost, PeerTimeout
from refmpc.launch.participants import play_client
from refmpc.net.framing import listed, name_of
from refmpc.net.sockets import SocketTransport
from refmpc.primitives.io import SHARE_DIGEST_BYTES
from vfl.local.client import Client as LocalClient

__all__ = ["local_client", "train_with_servers"]

_AGAIN = (PeerLost, PeerTimeout, PeerAborted, OutOfStep)  # what ends an attempt, and not the training


def local_client(identity: Identity, plan: LayerPlan, own: OwnColumns, rows: np.ndarray) -> LocalClient:
    """This client's rows and its layers as they start: public, the same at every participant that makes them."""
    config, name = identity.config, identity.name
    place = plan.client_names.index(name)
    used = rows[: plan.schedule.num_samples]
    return LocalClient(
        name=name,
        embeddings=own.outputs[used].astype(np.float64),
        row_bound=own.bound,
        columns=plan.shapes[place].columns,
        labels=own.label_numbers(used, config.run.classes) if name == config.label_client.name else None,
        block_outputs=[own.block(used)],
        lora=starting_layers(config, place),
        update=local_update(config),
    )


def train_with_servers(
    identity: Identity,
    plan: LayerPlan,
    own: OwnColumns,
    rows: np.ndarray,
    session: str,
    log: Log,
    state: Path,
    *,
    on_model: Callable[[TrainedClient], None],
    on_beat: Beat = lambda progress: None,
) -> TrainedClient:
    """Take part until all three servers have finished. ``on_model`` gets the model as soon as it is here."""
    total = plan.schedule.num_steps

    def on_step(done: int) -> None:
        on_beat({"complete": True, "progress": {"phase": "training", "done": done, "total": total}})

    log.info("training begins when everybody is here", steps=total, claim_covers=plan.claim.covers)
    directory = state / f"training-{session}"
    job = LayerClientJob(plan, local_client(identity, plan, own, rows), directory, on_step)
    with _alone(directory):
        calls = LiveCalls(
            identity,
            log,
            kind=TRAINING,
            session=session,
            rows=len(rows),
            parameters=plan.public_parameters(),
            largest_result=8 * plan.parameters + SHARE_DIGEST_BYTES,
            people=people_tag(state.parent, identity.name, own.ids),
            on_beat=on_beat,
        )
        return calls.train(job, on_model)


class LiveCalls(ServerCalls):
    """The calls of one client that stays."""

    def train(self, job: LayerClientJob, on_model: Callable[[TrainedClient], None]) -> TrainedClient:
        """Attempt after attempt, until all three servers have finished one."""
        trained, backoff = None, Backoff()
        while True:
            finished = True
            try:
                finished = self._call_all() or not self._attempt_begins()
                backoff.reset()
                if not finished:
                    trained = self._play(job)
                    on_model(trained)
                elif trained is None:
                    trained = receive_end(Client(self._identity.name, self._fetch()), _anew(job))
                    on_model(trained)
                if finished:
                    self.confirm()
                    if trained.warning:
                        self._log.warning("layer factors were shortened", reason=trained.warning)
                    return trained
            except _AGAIN as error:
                if finished:
                    self._waiting.on("the servers", str(error))
                else:
                    self._log.warning("the attempt failed, the servers are called again", reason=str(error))
            except ColumnsChanged as error:
                if self._identity.name in error.clients:
                    raise
                self._waiting.on(" and ".join(error.clients), str(error))
            finally:
                self._hang_up()
            backoff.wait()

    def _call_all(self) -> bool:
        """Call the three servers and compare plans; true if all of them have finished."""
        answers = {server: self._call(server, "live") for server in SERVERS}
        for server, answer in answers.items():
            self._compare(server, answer.get("parameters"))
        return all(answer.get("done") is True for answer in answers.values())

    def _attempt_begins(self) -> bool:
        """Wait until all three servers name the same attempt, and tell them so; false if all have finished instead."""
        self._log.info("servers reached, parameters agree")
        named: dict[int, str] = {}
        done: dict[int, bool] = {}
        until = float("inf")
        while len(named) < 3:
            for server in sorted(set(SERVERS) - named.keys()):
                message, _ = self._channels[server].receive()
                if "attempt" in message:
                    named[server] = str(message["attempt"])
                    continue
                done[server] = message.get("done") is True
                self._heed(message)
                self._channels[server].send({"waiting": True})
            if len(done) == 3 and all(done.values()):
                return False
            until = min(until, time.monotonic() + HANDOVER) if named else until
            if len(named) < 3 and time.monotonic() > until:
                others = listed(name_of(server) for server in SERVERS if server not in named)
                raise PeerLost(f"{others} did not begin the attempt that another server began")
        if len(set(named.values())) > 1:
            raise PeerLost("the servers named different attempts")  # one has met the others anew
        for channel in self._channels.values():
            channel.send({"takes": named[0]})
        self._waiting.over()
        self._log.info("all servers named the same attempt", attempt=named[0][:8])
        return True

    def _play(self, job: LayerClientJob) -> TrainedClient:
        connections: dict[Any, socket.socket] = {s: channel.connection for s, channel in self._channels.items()}
        transport = SocketTransport(connections, self.timeout)
        try:
            program = client_program
            trained: TrainedClient = play_client(self._identity.name, transport, program, _anew(job))[0]
            return trained
        finally:
            transport.close()


def _anew(job: LayerClientJob) -> LayerClientJob:
    """With layers as they start: what was applied so far comes from disk, not from an attempt that broke off."""
    return replace(job, client=job.client.fresh())


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One process at a time: two that apply gradients to the same layers would ruin them."""
    private_folder(directory)
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            way_out = "stop the other process first"
            require(False, "--state", str(directory), "used by no other process of this client", way_out)
        yield
    finally:
        os.close(lock)
