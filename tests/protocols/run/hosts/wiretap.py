"""What crosses the wire between participants: a recording TCP relay, a packet sniffer, and the check that it is TLS.

python -m tests.protocols.run.hosts.wiretap FILE     # record all TCP payloads that pass this namespace's bridge, until
stopped
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import struct
import sys
import threading
from collections import defaultdict
from pathlib import Path

_RECORD = struct.Struct(">BHH")
HANDSHAKE, APPLICATION = 22, 23
TYPES = {20: "change cipher spec", 21: "alert", HANDSHAKE: "handshake", APPLICATION: "application data"}


def record_types(stream: bytes) -> list[int]:
    """The types of all TLS records of one direction of a connection; raises if anything else is in it."""
    found, at = [], 0
    while at + _RECORD.size <= len(stream):
        kind, version, length = _RECORD.unpack_from(stream, at)
        if kind not in TYPES or version not in (0x0301, 0x0303) or length > (1 << 14) + 256:
            raise ValueError(f"at byte {at} of {len(stream)}: {stream[at : at + 16].hex()} begins no TLS record")
        found.append(kind)
        at += _RECORD.size + length
    return found


class Relay:
    """Passes connections to ``target`` on and remembers every byte, each direction of each connection for itself.

    ``cut`` breaks all connections; ``cut_after`` breaks each as soon as so many bytes have passed towards the target.
    """

    def __init__(self, target: tuple[str, int], host: str = "127.0.0.1", cut_after: int | None = None):
        self._target = target
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.streams: list[bytearray] = []
        self.cut_after = cut_after
        self.cuts = 0
        self._open: set[socket.socket] = set()
        self._stalled: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                try:
                    callee = socket.create_connection(self._target, timeout=5)
                except OSError:
                    caller.close()
                    continue
                with self._lock:
                    self._open |= {caller, callee}
                for source, sink, limited in ((caller, callee, True), (callee, caller, False)):
                    threading.Thread(target=self._pump, args=(source, sink, limited), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, limited: bool) -> None:
        stream = bytearray()
        self.streams.append(stream)
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if source in self._stalled:
                    continue
                stream += data
                sink.sendall(data)
                if limited and self.cut_after is not None and len(stream) > self.cut_after:
                    self.cuts += 1
                    break
        if source in self._stalled:
            return  # not even the end gets through
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def stall(self) -> None:
        """Let nothing more pass on the connections that are open, and close none: as if a host had lost its power."""
        self._stalled.update(self._open)

    def cut(self) -> None:
        """Break all connections that are open."""
        with self._lock:
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def close(self) -> None:
        self._listener.close()
        self.cut()


def sniff(file: Path) -> None:
    """Record TCP payloads of all packets that arrive at the ports of the bridge, until SIGTERM; in order, by flow."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(0x0003))
    tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
    flows: dict[tuple[str, int, str, int], dict[int, bytes]] = defaultdict(dict)
    starts: dict[tuple[str, int, str, int], int] = {}
    print("listening", flush=True)
    while not stopped.is_set():
        if not select.select([tap], [], [], 0.2)[0]:
            continue
        packet, (_, protocol, kind, *_) = tap.recvfrom(1 << 17)
        if protocol != 0x0800 or kind == socket.PACKET_OUTGOING:
            continue
        ip = packet[14:]
        header, total = (ip[0] & 15) * 4, int.from_bytes(ip[2:4], "big")
        if ip[9] != socket.IPPROTO_TCP:
            continue
        tcp = ip[header : total or None]
        source, target, sequence = struct.unpack_from(">HHI", tcp)
        flow = (socket.inet_ntoa(ip[12:16]), source, socket.inet_ntoa(ip[16:20]), target)
        if tcp[13] & 2:  # SYN: a new connection, perhaps on ports that were used before
            starts[flow] = sequence + 1
        payload = tcp[(tcp[12] >> 4) * 4 :]
        if payload and flow in starts:
            flows[flow][(sequence - starts[flow]) % 2**32] = payload
    streams = {" ".join(map(str, flow)): _join(pieces).hex() for flow, pieces in flows.items()}
    file.write_text(json.dumps(streams))


def _join(pieces: dict[int, bytes]) -> bytes:
    """The stream up to the first gap (the kernel drops packets for a tap that is too slow)."""
    stream = bytearray()
    for at in sorted(pieces):
        if at > len(stream):
            break
        stream[at:] = pieces[at] if at + len(pieces[at]) > len(stream) else stream[at:]
    return bytes(stream)


if __name__ == "__main__":
    sniff(Path(sys.argv[1]))
