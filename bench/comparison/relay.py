"""A userspace TCP relay that adds delay and a bandwidth limit, for programs that are not ours.

The kernel here has no netem, and our own transport imposes its profiles itself; the peers get the same profile from
this relay, by the same rule (``refmpc.net.emulation.ReceivingLine``): a chunk leaves when its directed link is free,
takes size/bandwidth to leave and arrives one delay later. All connections of a directed pair of parties share one link.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping

from refmpc.net.emulation import NetworkProfile, ReceivingLine

__all__ = ["free_ports", "relay"]

CHUNK = 1 << 18
HOST = "127.0.0.1"

Route = tuple[int, int]  # (party that connects, party that listens)


def free_ports(count: int) -> list[int]:
    """Loopback ports that were free a moment ago, all different."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class _Link:
    """One directed link between two parties, shared by all their connections."""

    def __init__(self, profile: NetworkProfile):
        self._line = ReceivingLine(profile)
        self._lock = threading.Lock()

    def arrival(self, size: int) -> float:
        with self._lock:
            return self._line.arrival(time.monotonic(), size)


def _pump(source: socket.socket, target: socket.socket, link: _Link) -> None:
    """Copy one direction until it ends: this thread reads and stamps, another waits and writes."""
    line: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def write() -> None:
        while True:
            arrival, data = line.get()
            remaining = arrival - time.monotonic()
            if remaining > 0:
                time.sleep(remaining)
            try:
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)
            except OSError:
                return

    threading.Thread(target=write, daemon=True).start()
    while True:
        try:
            data = source.recv(CHUNK)
        except OSError:
            data = b""
        line.put((link.arrival(len(data)), data))
        if not data:
            return


def _accept(listener: socket.socket, target_port: int, forth: _Link, back: _Link) -> None:
    while True:
        incoming, _ = listener.accept()
        outgoing = _connect(target_port)
        for end in (incoming, outgoing):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, target, link in ((incoming, outgoing, forth), (outgoing, incoming, back)):
            threading.Thread(target=_pump, args=(source, target, link), daemon=True).start()


def _connect(port: int, patience: float = 30.0) -> socket.socket:
    """The listening party may start later than the connecting one."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection((HOST, port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _serve(routes: dict[Route, int], profile: NetworkProfile) -> dict[Route, int]:
    """Start listening for every route; the ports."""
    links: dict[Route, _Link] = {}
    for i, j in routes:
        for pair in ((i, j), (j, i)):
            links.setdefault(pair, _Link(profile))
    ports = {}
    for (i, j), target_port in routes.items():
        listener = socket.create_server((HOST, 0), backlog=64)
        ports[i, j] = listener.getsockname()[1]
        arguments = (listener, target_port, links[i, j], links[j, i])
        threading.Thread(target=_accept, args=arguments, daemon=True).start()
    return ports


@contextlib.contextmanager
def relay(listening: Mapping[int, int], profile: NetworkProfile) -> Iterator[dict[Route, int]]:
    """Run a relay in a process of its own while the context lasts.

    ``listening`` maps each party to the port it really listens on. The context gives {(i, j): port}: the port at which
    party i finds party j.
    """
    routes = [(i, j, port) for j, port in listening.items() for i in listening if i != j]
    job = {"routes": routes, "delay": profile.delay, "bandwidth": profile.bandwidth}
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.comparison.relay"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the relay process ended with code {process.wait()} before it listened")
        yield {(i, j): port for i, j, port in json.loads(answer)}
    finally:
        process.stdin.close()  # the process ends when its input does
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def main() -> None:
    """The relay process: a job as one line of JSON in, the ports as one line out, and it runs until its input ends."""
    job = json.loads(sys.stdin.readline())
    profile = NetworkProfile("relay", job["delay"], job["bandwidth"])
    ports = _serve({(i, j): port for i, j, port in job["routes"]}, profile)
    print(json.dumps([(i, j, port) for (i, j), port in ports.items()]), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
