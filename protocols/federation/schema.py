"""What ``federation.toml`` says, as frozen objects: who takes part, what is trained. ``protocols.federation.read``
reads it."""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from accel.errors import InvalidArgument
from accel.validate import require
from protocols.settings import RunConfig
from refmpc.net.framing import Peer
from refmpc.net.tls import EarlierPin

__all__ = [
    "HOST",
    "BudgetConfig",
    "ClientEntry",
    "ConfigurationError",
    "FederationConfig",
    "PredictConfig",
    "RunConfig",
    "ServerEntry",
    "did_you_mean",
    "split_address",
]

HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|[0-9A-Fa-f:.]+")


class ConfigurationError(InvalidArgument):
    """A value in the file that cannot be used; names file, key, value, what is allowed, and the way out."""


@dataclass(frozen=True)
class _Recognised:
    """``fingerprint``: SHA-256 of a participant's certificate (DER), in hex; empty until pinned. While its key is
    being replaced ``earlier_fingerprint`` is accepted, too, until ``earlier_until``."""

    fingerprint: str = field(default="", kw_only=True)
    earlier_fingerprint: str = field(default="", kw_only=True)
    earlier_until: datetime.datetime | None = field(default=None, kw_only=True)

    @property
    def earlier(self) -> EarlierPin | None:
        if self.earlier_until is None:
            return None
        return EarlierPin(self.earlier_fingerprint, self.earlier_until)

    @property
    def pins(self) -> tuple[str, ...]:
        """The certificates that belong to it, also when the time of the earlier one is over."""
        return (self.fingerprint, *([self.earlier_fingerprint] if self.earlier_fingerprint else []))


@dataclass(frozen=True)
class ServerEntry(_Recognised):
    """One of the three computing servers."""

    id: int
    host: str
    port: int

    @property
    def name(self) -> str:
        return f"server-{self.id}"

    @property
    def role(self) -> str:
        """What its certificate must say."""
        return f"urn:ppvfl:server:{self.id}"

    @property
    def peer(self) -> Peer:
        return self.id


@dataclass(frozen=True)
class ClientEntry(_Recognised):
    """One data holder. ``width``: columns of its embedding. The one with ``label`` holds the labels, and listens at
    ``alignment`` for the others while ids are matched."""

    name: str
    width: int
    label: bool = False
    alignment: str = ""

    @property
    def role(self) -> str:
        """What its certificate must say."""
        return f"urn:ppvfl:client:{self.name}"

    @property
    def peer(self) -> Peer:
        return self.name

    @property
    def alignment_address(self) -> tuple[str, int] | None:
        return split_address(self.alignment) if self.alignment else None


@dataclass(frozen=True)
class PredictConfig:
    """Who receives predictions, and how many rows one request may have."""

    receiver: str
    maximum_rows: int = 100_000


@dataclass(frozen=True)
class BudgetConfig:
    """What may be spent in all on each client's people, over all runs at the same servers but those whose ``people``
    are named in ``apart_from``: everybody who has this file states that theirs are others."""

    epsilon: float
    delta: float
    people: str = "everybody"
    apart_from: tuple[str, ...] = ()


@dataclass(frozen=True)
class FederationConfig:
    """The whole file. ``certificates`` maps participants to their public certificate (PEM), if the file holds it."""

    name: str
    servers: tuple[ServerEntry, ...]
    clients: tuple[ClientEntry, ...]
    run: RunConfig
    predict: PredictConfig
    budget: BudgetConfig | None = None
    certificates: Mapping[str, str] = field(default_factory=dict, repr=False)
    source: str = field(default="federation.toml", compare=False)

    @property
    def participants(self) -> tuple[ServerEntry | ClientEntry, ...]:
        return (*self.servers, *self.clients)

    @property
    def label_client(self) -> ClientEntry:
        return next(client for client in self.clients if client.label)

    @property
    def ordered_clients(self) -> tuple[ClientEntry, ...]:
        """In the order of the embedding's columns: as in the file, the label client last."""
        return (*(client for client in self.clients if not client.label), self.label_client)

    @property
    def pins(self) -> dict[str, tuple[str, ...]]:
        """The certificates of each participant, in an order in which all files have them that agree otherwise."""
        everybody: tuple[ServerEntry | ClientEntry, ...] = (*self.servers, *self.ordered_clients)
        return {entry.name: entry.pins for entry in everybody}

    @property
    def addresses(self) -> dict[int, tuple[str, int]]:
        return {server.id: (server.host, server.port) for server in self.servers}

    def participant(self, name: str, argument: str = "participant") -> ServerEntry | ClientEntry:
        """The entry called ``server-0`` … ``server-2``, or by a client's name."""
        known = {entry.name: entry for entry in self.participants}
        require(name in known, argument, name, f"one of {', '.join(known)}", did_you_mean(name, known))
        return known[name]


def split_address(text: str, argument: str = "address") -> tuple[str, int]:
    """``host:port`` or ``[IPv6]:port``."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    good = bool(colon) and port.isascii() and port.isdigit() and 0 < int(port) < 65536 and bool(HOST.fullmatch(host))
    require(good, argument, text, "host:port with a port from 1 to 65535", "IPv6 addresses go into brackets")
    return host, int(port)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The way out of a misspelt word, if one of the known ones is close."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {close[0]!r}?" if close else ""
