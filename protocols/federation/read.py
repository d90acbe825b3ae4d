"""``federation.toml``: who takes part, how they are reached and recognised, and what they run together.

One file, the same at every participant; where somebody keeps their key and their columns is said on the command line.
``configuration_hash`` covers what all must agree on. It leaves out how a peer is reached (host, port, time-out): these
may differ behind a firewall, and a peer is recognised by its pinned certificate wherever it is. It leaves out the
pins, too, which two participants compare one by one (``other_pins``): a new certificate reaches one file after the
other.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from accel.errors import InvalidArgument
from accel.validate import require, require_choice, require_integer, require_real
from protocols.federation.schema import (
    HOST,
    BudgetConfig,
    ClientEntry,
    ConfigurationError,
    FederationConfig,
    PredictConfig,
    RunConfig,
    ServerEntry,
    did_you_mean,
    split_address,
)
from protocols.plan.combinations import refuse_combination, refuse_measuring, usual_task
from protocols.settings import agreed_options, declared, refuse_what_is_not_taken
from vfl.defaults import AUTOMATIC, table_row_bound
from vfl.losses import output_count
from vfl.methods import SECURE, facts
from vfl.training import TrainingConfig

__all__ = [
    "FORMAT",
    "ClientEntry",
    "ConfigurationError",
    "FederationConfig",
    "PredictConfig",
    "RunConfig",
    "ServerEntry",
    "agreed_values",
    "configuration_hash",
    "hash_with_certificates",
    "load",
    "other_pins",
    "parse",
    "pins_in_words",
    "split_address",
]

_TRAINING = declared("file", of=TrainingConfig)
FORMAT = 1  # of the file; raised when an older version could misread it
AUTO = "auto"  # a value that follows from public sizes
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_RESERVED = re.compile(r"server-?\d*|federation|certificates?|run|runs")


def agreed_values(config: FederationConfig) -> dict[str, Any]:
    """Everything that participants must agree on, by key: plain values, public among them."""
    values: dict[str, Any] = {"[federation] version": FORMAT, "[federation] name": config.name}
    for place, client in enumerate(config.ordered_clients):
        values[f"{client.name}: place"] = place
        for name in ("width", "label"):
            values[f"{client.name}: {name}"] = getattr(client, name)
    shared = agreed_options(config.run) | dict.fromkeys(config.run.automatic, AUTO)
    values |= {f"[run] {name}": value for name, value in shared.items()}
    budget = asdict(config.budget) if config.budget else {}
    if not budget.get("apart_from"):  # files without it agree with those of before there was any
        budget.pop("apart_from", None)
    values |= {f"[budget] {name}": value for name, value in budget.items()}
    values |= {f"[predict] {name}": value for name, value in asdict(config.predict).items()}
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def configuration_hash(config: FederationConfig) -> str:
    """SHA-256 over ``agreed_values`` in a canonical form (keys sorted, floats in their shortest exact form)."""
    return _hash(agreed_values(config))


def hash_with_certificates(config: FederationConfig) -> str:
    """As an earlier version named its state; ``configuration_hash`` stays the same when certificates are replaced."""
    return _hash(agreed_values(config) | {f"{name}: fingerprint": pins[0] for name, pins in config.pins.items()})


def pins_in_words(config: FederationConfig) -> str:
    """Half the digits of every certificate that belongs to a participant, for ``other_pins`` at another."""
    return ",".join("+".join(pin[:32] for pin in pins) for pins in config.pins.values())


def other_pins(config: FederationConfig, theirs: str) -> list[str]:
    """The participants of whom ``theirs`` (``pins_in_words`` there) and ``config`` have no certificate in common.

    One in common suffices: whoever replaces a key holds both, so both name the same participant, and files may arrive
    one after the other while one certificate is added and another removed. What this does not notice is a second pin
    that somebody has slipped into one file: it opens that file's host until the stated end.
    """
    mine, others = pins_in_words(config).split(","), theirs.split(",")
    return [
        name
        for place, name in enumerate(config.pins)
        if place >= len(others) or not {*mine[place].split("+")} & {*others[place].split("+")}
    ]


def _hash(values: dict[str, Any]) -> str:
    words = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(words.encode()).hexdigest()


def load(path: str | Path, *, pinned: bool = True) -> FederationConfig:
    """Read the file; with ``pinned`` (default) every participant must have its fingerprint."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"{file} does not exist: give --config FILE, or write one with `ppvfl init`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from None
    return parse(text, str(file), pinned=pinned)


def parse(text: str, source: str = "federation.toml", *, pinned: bool = True) -> FederationConfig:
    """``load`` for text."""
    try:
        config = _Reader(tomllib.loads(text), source).config()
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{source} is not valid TOML: {error}; text goes into quotes") from None
    except ConfigurationError:
        raise
    except InvalidArgument as error:
        raise ConfigurationError(f"{source}: {error}") from None
    missing = [entry.name for entry in config.participants if not entry.fingerprint]
    if pinned and missing:
        raise ConfigurationError(
            f"{source}: no fingerprint for {', '.join(missing)}, so others cannot recognise it; "
            f"run `ppvfl pin --participant {missing[0]} --certificate FILE` with its signed certificate"
        )
    return config


# reading -----------------------------------------------------------------------------------------


class _Reader:
    """Checks of one file. Every error says where: section, number of the entry, key."""

    def __init__(self, document: dict[str, Any], source: str):
        self._document = document
        self._source = source

    def config(self) -> FederationConfig:
        document = self._document
        self._known(
            "the file", document, ("federation", "server", "client", "run", "predict", "budget", "certificates")
        )
        head = self._table("federation")
        self._known("[federation]", head, ("name", "version"))
        require_integer("[federation] version", head.get("version"), FORMAT, FORMAT, "this software reads version 1")
        servers = tuple(self._server(entry, i) for i, entry in enumerate(self._tables("server")))
        require(
            [server.id for server in servers] == [0, 1, 2],
            "[[server]] id",
            [server.id for server in servers],
            "0, 1 and 2, in this order",
            "the computation needs exactly three servers",
        )
        clients = tuple(self._client(entry, i) for i, entry in enumerate(self._tables("client")))
        self._together(servers, clients)
        run = self._run(self._table("run"), sum(client.width for client in clients))
        predict = self._table("predict", optional=True)
        self._known("[predict]", predict, ("receiver", "maximum_rows"))
        label = next(client.name for client in clients if client.label)
        receiver = self._choice("[predict] receiver", predict.get("receiver", label), [c.name for c in clients])
        rows = require_integer("[predict] maximum_rows", predict.get("maximum_rows", 100_000), 1, 10**9)
        config = FederationConfig(
            name=self._text("[federation] name", head.get("name"), "a short name of the federation"),
            servers=servers,
            clients=clients,
            run=run,
            predict=PredictConfig(receiver, rows),
            budget=self._budget(run),
            source=self._source,
        )
        return replace(config, certificates=self._certificates(config))

    def _budget(self, run: RunConfig) -> BudgetConfig | None:
        table = self._table("budget", optional=True)
        if not table:
            return None
        self._known("[budget]", table, tuple(f.name for f in fields(BudgetConfig)))
        epsilon = self._real("[budget] epsilon", table.get("epsilon"))
        delta = self._real("[budget] delta", table.get("delta", run.training.delta))
        words = "whose data it is, in words"
        people = self._text("[budget] people", table.get("people", BudgetConfig.people), words)
        apart = table.get("apart_from", [])
        require(
            isinstance(apart, list), "[budget] apart_from", apart, "a list of what `people` was in other federations"
        )
        others = tuple(self._text("[budget] apart_from", word, words) for word in apart)
        require(
            people not in others, "[budget] apart_from", list(others), f"without {people!r}, the people of this file"
        )
        return BudgetConfig(
            epsilon=require_real("[budget] epsilon", epsilon, 0.0, open_low=True),
            delta=require_real("[budget] delta", delta, 0.0, 1.0, open_low=True, open_high=True),
            people=people,
            apart_from=others,
        )

    def _server(self, entry: Mapping[str, Any], index: int) -> ServerEntry:
        where = f"[[server]] {index}"
        self._known(where, entry, tuple(f.name for f in fields(ServerEntry)))
        host = self._text(f"{where}: host", entry.get("host"), "a host name or an IP address")
        require(bool(HOST.fullmatch(host)), f"{where}: host", host, "a host name or an IP address", "without the port")
        return ServerEntry(
            id=require_integer(f"{where}: id", entry.get("id"), 0, 2),
            host=host,
            port=require_integer(f"{where}: port", entry.get("port"), 1, 65535),
            **self._pins(where, entry),
        )

    def _client(self, entry: Mapping[str, Any], index: int) -> ClientEntry:
        where = f"[[client]] {index}"
        self._known(where, entry, tuple(f.name for f in fields(ClientEntry)))
        name = self._text(f"{where}: name", entry.get("name"), "a short name")
        require(
            bool(_NAME.fullmatch(name)) and not _RESERVED.fullmatch(name),
            f"{where}: name",
            name,
            "a lower-case letter, then at most 31 of a-z, 0-9, - and _, and no reserved word such as server-0",
        )
        alignment = entry.get("alignment", "")
        require(isinstance(alignment, str), f"{where}: alignment", alignment, 'text such as "bank.example:7100"')
        if alignment:
            split_address(alignment, f"{where}: alignment")
        return ClientEntry(
            name=name,
            width=require_integer(
                f"{where}: width", entry.get("width"), 1, 1 << 20, "the number of columns that this client shares"
            ),
            **self._pins(where, entry),
            label=self._boolean(f"{where}: label", entry.get("label", False)),
            alignment=alignment,
        )

    def _pins(self, where: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The pinned certificate, and the one that is accepted beside it until a time."""
        pin, earlier = (self._fingerprint(where, entry, name) for name in ("fingerprint", "earlier_fingerprint"))
        until, argument = entry.get("earlier_until"), f"{where}: earlier_until"
        zoned = isinstance(until, datetime.datetime) and until.tzinfo is not None
        form = "a time with its zone, without quotes, such as 2030-01-31T12:00:00Z"
        require(zoned or until is None, argument, until, form)
        require((until is not None) == bool(earlier), argument, until, f"{form}, beside earlier_fingerprint only")
        until = until.astimezone(datetime.UTC) if isinstance(until, datetime.datetime) else None
        return {"fingerprint": pin, "earlier_fingerprint": earlier, "earlier_until": until}

    def _fingerprint(self, where: str, entry: Mapping[str, Any], name: str) -> str:
        given = entry.get(name, "")
        text = given.replace(":", "").lower() if isinstance(given, str) else ""
        require(
            isinstance(given, str) and bool(re.fullmatch(r"([0-9a-f]{64})?", text)),
            f"{where}: {name}",
            given,
            "64 hexadecimal digits, the SHA-256 of the certificate",
            "`ppvfl pin` writes it, `openssl x509 -noout -fingerprint -sha256 -in FILE` prints it",
        )
        return text

    def _together(self, servers: Iterable[ServerEntry], clients: tuple[ClientEntry, ...]) -> None:
        names = [client.name for client in clients]
        require(len(clients) >= 1, "[[client]]", "none", "at least one client")
        require(len(set(names)) == len(names), "[[client]] name", names, "all different")
        labels = [client.name for client in clients if client.label]
        require(len(labels) == 1, "[[client]] label = true", labels, "set for exactly one client, who has the labels")
        leader = next(client for client in clients if client.label)
        require(
            bool(leader.alignment) or len(clients) == 1,
            f"alignment of {leader.name}",
            leader.alignment,
            "host:port, where the label client listens for the other clients while ids are matched",
        )
        seen: dict[str, str] = {}
        everybody: list[ServerEntry | ClientEntry] = [*servers, *clients]
        for entry in everybody:
            require(
                len({*entry.pins}) == len(entry.pins), f"earlier_fingerprint of {entry.name}", "the same", "another"
            )
            for pin in entry.pins:
                other = seen.setdefault(pin or entry.name, entry.name)
                require(
                    other == entry.name,
                    f"fingerprint of {entry.name}",
                    pin[:16] + "…",
                    f"another one than that of {other}",
                    "each participant needs a key of its own, or one could act as the other",
                )
        places: dict[tuple[str, int], int] = {}
        for server in servers:
            first = places.setdefault((server.host.lower(), server.port), server.id)
            require(
                first == server.id,
                f"[[server]] {server.id}: port",
                server.port,
                f"another host or port than server-{first}'s",
            )

    def _run(self, table: Mapping[str, Any], width: int) -> RunConfig:
        structure = ("protocol", "classes", "target_range")
        self._known("[run]", table, (*structure, *(each.name for each in declared("file"))))
        automatic = tuple(name for name in AUTOMATIC if table.get(name, AUTO) == AUTO)
        method = facts(self._choice("[run] protocol", table.get("protocol", SECURE[0]), SECURE))
        given = {
            each.name: each.check(table[each.name], f"[run] {each.name}")
            for each in declared("file")
            if each.name in table and (table[each.name] != AUTO or each.at("file") is not None)
        }
        regression = given.get("task") == "regression"
        classes = () if regression else self._classes(table.get("classes"))
        require(
            not regression or "classes" not in table,
            "[run] classes",
            table.get("classes"),
            "absent in a regression, whose label is a number",
            "give target_range = [lowest, highest] instead",
        )
        task = usual_task(method, len(classes), given.get("hidden", ()), given.get("gradients", "factored"))
        usual = {each.name: each.at("file") for each in declared("file") if each.at("file") is not None}
        rule = given.get("row_rule", usual["row_rule"])
        usual |= {"task": task, "row_bound": table_row_bound(width) if rule == "clip" else 1.0}
        if method.takes("layers"):
            usual["checkpoint_every"] = 0
        chosen = usual | given
        try:
            training = TrainingConfig(**{one.name: chosen.pop(one.name) for one in _TRAINING if one.name in chosen})
            if classes:
                output_count(training.task, len(classes), training.class_weights)
            self._choice("noise", training.noise, ("distributed",))  # joint noise is not built for deployments yet
            refuse_combination(method.name, training)
            refuse_what_is_not_taken(method.name, given)
            refuse_measuring(method, training, "public_rows", chosen["public_rows"], chosen["patience"])
        except InvalidArgument as error:
            raise InvalidArgument(f"[run] {error}") from None
        every, way_out = chosen["checkpoint_every"], "0: gl_bmf keeps every step, before it opens anything of it"
        require(not (every and method.takes("layers")), "[run] checkpoint_every", every, way_out)
        digest, way_out = chosen["public_rows"], "`ppvfl public-rows` writes it, and the rows"
        good = bool(re.fullmatch(r"([0-9a-f]{64})?", digest))
        require(good, "[run] public_rows", digest, "64 hexadecimal digits, the rows' SHA-256", way_out)
        target = self._target_range(table.get("target_range"), regression)
        return RunConfig(method.name, training, classes=classes, target_range=target, automatic=automatic, **chosen)

    def _target_range(self, given: Any, regression: bool) -> tuple[float, float] | None:
        where = "[run] target_range"
        if not regression:
            require(given is None, where, given, "absent with classes", 'set task = "regression" to predict a number')
            return None
        good = isinstance(given, list) and len(given) == 2
        require(good, where, given, "[lowest, highest], public, of the number that is to be predicted")
        assert isinstance(given, list)
        low, high = (self._real(where, value) for value in given)
        return low, require_real(where, high, low, open_low=True)

    def _classes(self, given: Any) -> tuple[str, ...]:
        allowed = "a number of classes from 2 to 1000 (labels 0, 1, …), or the list of label texts"
        if isinstance(given, list):
            require(all(isinstance(name, str) and name for name in given), "[run] classes", given, allowed)
            require(len(set(given)) == len(given), "[run] classes", given, "all different")
            require(2 <= len(given) <= 1000, "[run] classes", len(given), allowed)
            return tuple(given)
        count = isinstance(given, int) and not isinstance(given, bool) and 2 <= given <= 1000
        require(count, "[run] classes", given, allowed)
        return tuple(map(str, range(given)))

    def _certificates(self, config: FederationConfig) -> dict[str, str]:
        table = self._table("certificates", optional=True)
        self._known("[certificates]", table, [entry.name for entry in config.participants])
        return {name: self._text(f"[certificates] {name}", text, "a PEM certificate") for name, text in table.items()}

    # small ones

    def _known(self, where: str, table: Mapping[str, Any], names: Iterable[str]) -> None:
        allowed = list(names)
        for name in table:
            require(name in allowed, f"{where}: key", name, f"one of {', '.join(allowed)}", did_you_mean(name, allowed))

    def _table(self, name: str, *, optional: bool = False) -> dict[str, Any]:
        table = self._document.get(name, {} if optional else None)
        require(isinstance(table, dict), f"[{name}]", "missing" if table is None else table, f"a section [{name}]")
        assert isinstance(table, dict)
        return table

    def _tables(self, name: str) -> list[dict[str, Any]]:
        tables = self._document.get(name, [])
        good = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
        require(good, f"[[{name}]]", tables, f"sections [[{name}]], in double brackets, one for each")
        assert isinstance(tables, list)
        return tables

    def _text(self, where: str, value: Any, allowed: str) -> str:
        require(isinstance(value, str) and 0 < len(value) <= 100_000, where, value, allowed)
        return str(value)

    def _boolean(self, where: str, value: Any) -> bool:
        require(isinstance(value, bool), where, value, "true or false")
        return bool(value)

    def _real(self, where: str, value: Any) -> float:
        require(
            isinstance(value, int | float) and not isinstance(value, bool), where, value, "a number, without quotes"
        )
        return float(value)

    def _choice(self, where: str, value: Any, choices: Iterable[str]) -> str:
        names = list(choices)
        return require_choice(where, value, names, did_you_mean(str(value), names))
