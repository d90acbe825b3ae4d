"""``ppvfl server``: one of the three servers. Listens, takes in what clients send, trains with the two others, hands
out.

Everything a server has accepted is on its disk, so it may be stopped and started again at any time: with the same
configuration and the same ``--state`` it goes on where it was. The others notice, wait, and meet it again.
"""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path
from typing import Any

from accel.validate import require
from protocols.federation.read import ServerEntry, load, split_address
from protocols.log import Log
from protocols.net.credentials import load_credentials, own_directory, two_pins, validity_warning
from protocols.net.wire import Identity
from protocols.run.hosts.server import Server, load_kernels

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """The command line."""
    parser = subparsers.add_parser("server", help="run one of the three servers", description=__doc__)
    parser.add_argument(
        "--as", dest="name", required=True, metavar="NAME", help="which one: server-0, server-1, server-2"
    )
    parser.add_argument("--config", default="federation.toml", metavar="FILE")
    parser.add_argument("--credentials", metavar="DIR", help="where key.pem and certificate.pem lie (default: ./NAME)")
    parser.add_argument("--state", metavar="DIR", help="what survives a restart is kept here (default: ./NAME/state)")
    parser.add_argument(
        "--listen", metavar="HOST", help="address to listen on (default: the server's host in the file)"
    )
    parser.add_argument(
        "--until-trained",
        action="store_true",
        help="end when every client has the model (default: stay, for `ppvfl predict`)",
    )
    parser.add_argument(
        "--status",
        metavar="HOST:PORT",
        help="where the status page listens (default: loopback, 1000 above the server's port; 'off': nowhere)",
    )
    parser.add_argument("--log", metavar="FILE", help="structured log, a JSON object a line (default: stderr)")


def run(arguments: argparse.Namespace) -> int:
    """Serve until all clients have the model, or until stopped."""
    config = load(arguments.config)
    entry = config.participant(arguments.name, "--as")
    require(isinstance(entry, ServerEntry), "--as", arguments.name, "a server", "clients run `ppvfl client`")
    assert isinstance(entry, ServerEntry)
    identity = Identity(config, entry.id, load_credentials(config, entry.name, arguments.credentials))
    state = Path(arguments.state or own_directory(config, entry.name, arguments.credentials) / "state")
    log = Log(entry.name, None if arguments.log is None else Path(arguments.log))
    if expiry := validity_warning(identity.credentials.certificate):
        log.warning("own certificate", reason=expiry)
    for window in two_pins(config, identity.credentials.certificate):
        log.info("a key is being replaced", reason=window)
    stays = not arguments.until_trained
    server = Server(identity, state, log, host=arguments.listen or entry.host, predictions=stays)
    if arguments.status != "off":
        asked = arguments.status or f"127.0.0.1:{min(entry.port + 1000, 65535)}"
        server.show_status(split_address(asked, "--status"), required=arguments.status is not None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop.set())
    server.ready.clear()
    threading.Thread(target=load_kernels, args=(config, state, log, server.ready), daemon=True).start()
    return server.serve()
