"""The options of a run, each declared once: here, and for what a training computes in ``vfl.training``.

The command line, ``federation.toml`` and its template, the estimators' arguments, the table of the documentation and
the hash that participants compare are made from these declarations.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from accel.validate import require
from vfl.alignment import MATCHINGS
from vfl.data.sets import DATA_SETS
from vfl.local.config import LOCAL_MODELS
from vfl.local.lora import ALL_LAYERS
from vfl.methods import FACTS, SECURE, Facts, facts
from vfl.settings import Setting, check_settings, setting, settings_of
from vfl.training import SETTINGS as PAPER_SETTINGS
from vfl.training import TrainingConfig

__all__ = [
    "RunConfig",
    "RunOptions",
    "add_arguments",
    "agreed_options",
    "declared",
    "estimator_signature",
    "refuse_what_is_not_taken",
    "settings_table",
    "template_lines",
]

_COMMAND, _FILE = ("command",), ("file",)
_BOTH = ("command", "file")
_OF_LAYERS: dict[str, Any] = {"group": "local models", "needs": "layers", "written": "comment"}
_WHERE: dict[str, Any] = {"group": "where and how", "doors": _COMMAND}
_DATA: dict[str, Any] = {"group": "data", "doors": _COMMAND}


@dataclass(frozen=True)
class RunOptions:
    """Everything a run was asked for, besides the training itself."""

    protocol: str
    training: TrainingConfig
    data: str = setting("digits", "data set, split vertically", choices=DATA_SETS, **_DATA)
    data_root: str | None = setting(
        None, "where data sets that are not embedded lie", kind=str, optional=True, metavar="DIR", **_DATA
    )
    embeddings: str | None = setting(
        None, "precomputed embeddings (.npz) instead of --data", kind=str, optional=True, metavar="FILE", **_DATA
    )
    clients: int = setting(2, "number of clients; the last holds the labels", low=1, **_DATA)
    local_model: str = setting("identity", "frozen model at each client", choices=tuple(LOCAL_MODELS), **_DATA)
    local_weights: str | None = setting(
        None, "weights of the local model, from public data", kind=str, optional=True, metavar="FILE", **_DATA
    )
    row_bound: float = setting(
        1.0,
        "R, the public bound on the norm of each person's row, all clients together; for tables 4·√(sum of widths)",
        low=0.0,
        open_low=True,
        group="data",
        usual=(("command", None), ("file", None), ("api", None)),
    )
    row_rule: str = setting(
        "normalise",
        "how rows are brought within R: clip (long ones are shrunk) or normalise (all have this norm, which suits "
        "embeddings and "
        "images; of a client's one or two columns it leaves little but signs). For tables clip",
        choices=("clip", "normalise"),
        group="data",
        usual=(("command", None), ("file", "clip"), ("api", "clip")),
    )
    local_update: str = setting(
        "released",
        "what clients do with their gradient: apply it (claim on features and labels), or the paper's estimate "
        "(labels only)",
        choices=("released", "estimated"),
        doors=_BOTH,
        **_OF_LAYERS,
    )
    local_learning_rate: float = setting(
        0.05, "η of the clients' own layers", low=0.0, open_low=True, doors=_BOTH, **_OF_LAYERS
    )
    rank: int = setting(8, "rank of the LoRA layers", low=1, high=1 << 12, doors=_BOTH, **_OF_LAYERS)
    lora_alpha: float = setting(8.0, "LoRA scaling is α/rank", low=0.0, open_low=True, doors=_BOTH, **_OF_LAYERS)
    lora_layers: str = setting(
        ALL_LAYERS,
        "blocks of the local model that LoRA reads: all, first, last, or numbers from 1, as 1,2",
        metavar="LAYERS",
        doors=_COMMAND,
        **_OF_LAYERS,
    )
    train_layer: str | None = setting(
        None,
        "instead of LoRA layers, train this layer of the local model by its Jacobians (cnn: one; small layers only)",
        kind=str,
        optional=True,
        metavar="NAME",
        doors=_COMMAND,
        **_OF_LAYERS,
    )
    jacobian_bound: float = setting(
        4.0,
        "public bound on the Jacobian of that layer, per row",
        low=0.0,
        open_low=True,
        doors=_COMMAND,
        **_OF_LAYERS,
    )
    parties: str = setting("processes", "how servers and clients run here", choices=("processes", "threads"), **_WHERE)
    network: str = setting("loopback", "emulated network", choices=("loopback", "lan", "wan"), **_WHERE)
    backend: str = setting(
        "refmpc",
        "mpspdz: also let the MP-SPDZ at MPSPDZ_HOME execute the same steps, and compare the weights (small runs)",
        choices=("refmpc", "mpspdz"),
        needs="MP-SPDZ",
        **_WHERE,
    )
    tls: bool = setting(False, "mutual TLS between all participants (own certificates)", **_WHERE)
    timeout: float = setting(
        60.0,
        "seconds to wait for a silent peer",
        low=1.0,
        high=86400.0,
        group="where and how",
        agreed="never",
    )
    out: str = setting("runs", "runs are kept here", metavar="DIR", **_WHERE)
    checkpoint_every: int = setting(
        0,
        "steps between checkpoints, from which a run that was interrupted goes on; 0: none (with open weights, and "
        "in GL-BMF, any "
        "other number keeps every step)",
        low=0,
        metavar="STEPS",
        group="where and how",
        doors=_BOTH,
        usual=(("file", 100),),
        written="comment",
    )
    durability: str = setting(
        "process",
        "open weights with checkpoints: what is written before it is opened survives the end of a process, or a "
        "power failure too",
        choices=("process", "power"),
        needs="servers",
        **_WHERE,
    )
    twin: bool = setting(
        False, "also train the plaintext twin with the servers' noise and compare (one machine only)", **_WHERE
    )
    public_fraction: float = setting(
        0.0,
        "declare this part of the training rows public: they are not trained on, and accuracy and loss on them are "
        "measured after "
        "every epoch (open weights; costs no privacy)",
        low=0.0,
        high=1.0,
        open_high=True,
        metavar="F",
        needs="public rows",
        doors=_COMMAND,
    )
    patience: int = setting(
        0,
        "stop when so many epochs have not raised the accuracy on the public rows, and give the best model; 0: never",
        low=0,
        metavar="EPOCHS",
        needs="public rows",
        doors=_BOTH,
        written="nothing",
        agreed="if changed",
    )
    plot: bool = setting(False, "draw costs by phase as PNG", **_WHERE)
    json: bool = setting(False, "print JSON instead of tables", **_WHERE)
    estimate: bool = setting(False, "print what the run would cost, and run nothing", **_WHERE)
    calibrate: bool = setting(
        False,
        "with --estimate: run a few steps of this shape here, and say how long the run would take over --network",
        needs="timing",
        **_WHERE,
    )
    resume: str | None = setting(
        None,
        "continue the run in DIR (all other options come from there)",
        kind=str,
        optional=True,
        metavar="DIR",
        **_WHERE,
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written to config.json."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of ``to_dict``."""
        known = {field.name for field in fields(cls)}
        training = dict(values["training"])
        for name in ("hidden", "class_weights"):
            training[name] = tuple(training.get(name, ()))
        rest = {name: value for name, value in values.items() if name in known and name != "training"}
        return cls(training=TrainingConfig(**training), **rest)


@dataclass(frozen=True)
class RunConfig(RunOptions):
    """The section [run] of ``federation.toml``. ``classes`` are the label texts, in the order of the outputs, or
    (regression) there are none and ``target_range`` is what −1 and 1 stand for. ``automatic``: which parameters of the
    training follow from the number of rows and ε (``vfl.defaults``), whatever ``training`` says."""

    classes: tuple[str, ...] = ()
    target_range: tuple[float, float] | None = None
    automatic: tuple[str, ...] = ()
    held_out: float = setting(
        0.0,
        "share of the common rows that takes no part, for `ppvfl predict --held-out`",
        low=0.0,
        high=0.5,
        doors=_FILE,
    )
    public_rows: str = setting(
        "",
        "digest of the labelled rows that are measured on after every epoch; `ppvfl public-rows` writes it",
        doors=_FILE,
        written="nothing",
        agreed="if changed",
    )
    matching: str = setting(
        "ot",
        "how clients find their common rows: ot (transfers of keys, AES, hashes), or ecdh (every id blinded by every "
        "client: 60 times "
        "the work)",
        choices=tuple(MATCHINGS),
        doors=_FILE,
        group="data",
        written="comment",
        agreed="if changed",
    )
    retention_days: float = setting(
        0.0,
        "days without an event after which a server forgets a session: shares, noise, results; 0: never",
        low=0.0,
        high=36500.0,
        doors=_FILE,
        written="comment",
        agreed="never",
    )
    maximum_rows: int = setting(
        10**8,
        "common rows that a plan is made for",
        low=1,
        high=10**9,
        doors=_FILE,
        written="comment",
        agreed="if changed",
    )

    @property
    def layers(self) -> RunConfig | None:
        """What the clients' own layers are like, if the method trains any."""
        return self if facts(self.protocol).takes("layers") else None


GROUPS = ("data", "training", "privacy", "local models", "where and how")


def declared(door: str = "", *, of: type | None = None) -> tuple[Setting, ...]:
    """All options, or those of a door; ``of``: what one dataclass declares."""
    known = settings_of(of) if of is not None else (*settings_of(TrainingConfig), *settings_of(RunConfig))
    return tuple(each for each in known if not door or door in each.doors)


def refuse_what_is_not_taken(method: str, given: Mapping[str, Any]) -> None:
    """Refuse options that mean nothing in this method, unless they say what holds anyway."""
    for each in declared():
        if each.name in given and not facts(method).takes(each.needs):
            value, others = given[each.name], [name for name, entry in FACTS.items() if entry.takes(each.needs)]
            require(
                value in (each.default, *(usual for _, usual in each.usual)),
                each.name,
                value,
                f"absent in {method}",
                f"only {', '.join(others)} can have it",
            )


# the command line ----------------------------------------------------------------------------------


def _listed(kind: type) -> Callable[[str], tuple[Any, ...]]:
    def read(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.split(",") if part.strip())
        except ValueError:
            what = "whole numbers" if kind is int else "numbers"
            raise argparse.ArgumentTypeError(f"{text!r}: must be {what} separated by commas, such as 128,64") from None

    return read


def add_arguments(parser: argparse.ArgumentParser, method: Facts) -> None:
    """Every option of the command line; help for those that the method takes. What is not given is None."""
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for each in declared("command"):
        words: dict[str, Any] = {"help": _help(each) if method.takes(each.needs) else argparse.SUPPRESS}
        if each.kind is bool:
            groups[each.group].add_argument(each.flag, action="store_true", default=None, **words)
            continue
        words |= {"choices": each.choices} if each.choices else {"metavar": each.metavar} if each.metavar else {}
        kind = _listed(each.kind) if each.several else each.kind
        groups[each.group].add_argument(each.flag, type=kind, default=None, **words)
    words = {"type": int, "choices": tuple(PAPER_SETTINGS), "help": "the paper's workload 1 or 2 (momentum 0.9)"}
    groups["training"].add_argument("--setting", **words)


def _help(each: Setting) -> str:
    usual = each.at("command")
    told = (
        ""
        if usual in (None, (), "", False)
        else f" (default {usual:g})"
        if each.kind is float
        else f" (default {usual})"
    )
    return (each.help + told).replace("%", "%%")


# federation.toml -----------------------------------------------------------------------------------


def agreed_options(config: RunConfig) -> dict[str, Any]:
    """What participants compare of the section [run]."""
    entry = facts(config.protocol)
    found = {name: getattr(config, name) for name in ("protocol", "classes", "target_range")}
    for each in declared("file", of=RunConfig):
        value = getattr(config, each.name)
        if (
            each.agreed == "never"
            or (each.agreed == "if changed" and value == each.default)
            or not entry.takes(each.needs)
        ):
            continue
        found[each.name] = value
    for each in declared("file", of=TrainingConfig):
        value = getattr(config.training, each.name)
        if each.agreed != "if changed" or value != each.default:
            found[each.name] = value
    return found


def template_lines(values: Mapping[str, Any]) -> str:
    """The options of a new ``federation.toml``, with what each means; ``values`` replace defaults."""
    lines: list[str] = []
    for group in GROUPS:
        known = [each for each in declared("file") if each.group == group and each.written != "nothing"]
        lines += [f"# {group}"] if known else []
        for each in sorted(known, key=lambda one: one.written == "comment"):
            value = values.get(each.name, each.at("file"))
            text = f"{'# ' if each.written == 'comment' else ''}{each.name} = {_toml(value, each)}"
            lines += _commented(text, each.help)
    return "\n".join(lines) + "\n"


def _toml(value: Any, each: Setting) -> str:
    if value is None:
        return "8" if each.optional else '"auto"'
    if each.several:
        return str(list(value))
    return f'"{value}"' if isinstance(value, str) else str(value).replace("e-0", "e-")


def _commented(text: str, help: str, width: int = 120) -> list[str]:
    """``text  # help``, the help broken at ``width``."""
    lines, start = [f"{text:<23} #"], 23
    for word in help.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append(" " * start + " #")
        lines[-1] += f" {word}"
    return lines


# estimators ----------------------------------------------------------------------------------------


def estimator_signature(own: Iterable[tuple[str, Any]], without: Iterable[str] = ()) -> inspect.Signature:
    """The arguments of an estimator: ``own`` ones (name, default), the first by place, then the options of the API."""
    left_out = set(without)
    named = dict(own) | {each.name: each.at("api") for each in declared("api") if each.name not in left_out}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    first = inspect.Parameter("self", kinds[0])
    rest = [inspect.Parameter(name, kinds[i > 0], default=value) for i, (name, value) in enumerate(named.items())]
    return inspect.Signature([first, *rest])


# documentation -------------------------------------------------------------------------------------


def settings_table() -> str:
    """Markdown: every option, where it is given, what it may be, and which methods take it."""
    lines = ["| option | given in | values | default | meaning | methods |", "|---|---|---|---|---|---|"]
    doors = {"command": "command", "file": "federation.toml", "api": "estimators"}
    for each in declared():
        if each.doors:
            who = [entry.title for name, entry in FACTS.items() if name in SECURE and entry.takes(each.needs)]
            default = "; ".join(dict.fromkeys(_shown(each.at(door)) for door in each.doors))
            where = "all" if each.doors == tuple(doors) else ", ".join(doors[door] for door in each.doors)
            methods = "all" if len(who) == len(SECURE) else ", ".join(who)
            cells = (f"`{each.name}`", where, each.type_in_words, default, each.help.replace("|", "\\|"), methods)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return "chosen" if value is None else "none" if value in ((), "") else f"`{value}`"
