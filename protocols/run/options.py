"""The command line that all protocols share."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from accel.errors import InvalidArgument
from protocols.version import add_version_option
from vfl.data.sets import DATA_SETS, EMBEDDED_TABLES, NUMBERS
from vfl.defaults import averaging_fits, table_row_bound, training_defaults
from vfl.dp.factorisation import KINDS
from vfl.local.config import LOCAL_MODELS
from vfl.local.lora import ALL_LAYERS
from vfl.losses import TASKS
from vfl.training import AVERAGES, LARGEST_EPSILON, ORDERS, SETTINGS, TrainingConfig

__all__ = ["RunOptions", "parse_options"]


MLP_LEARNING_RATE = 0.5  # on digits at ε = 3: 84 to 89 %; at 2 the noise in two layers multiplies


@dataclass(frozen=True)
class RunOptions:
    """Everything a run was asked for, besides the training itself."""

    protocol: str
    training: TrainingConfig
    data: str = "digits"
    data_root: str | None = None
    embeddings: str | None = None
    clients: int = 2
    local_model: str = "identity"
    local_weights: str | None = None
    row_bound: float = 1.0
    row_rule: str = "normalise"
    local_update: str = "released"
    local_learning_rate: float = 0.05
    rank: int = 8
    lora_alpha: float = 8.0
    lora_layers: str = ALL_LAYERS
    train_layer: str | None = None
    jacobian_bound: float = 4.0
    parties: str = "processes"
    network: str = "loopback"
    backend: str = "refmpc"
    tls: bool = False
    timeout: float = 60.0
    out: str = "runs"
    checkpoint_every: int = 0
    durability: str = "process"
    twin: bool = False
    public_fraction: float = 0.0
    patience: int = 0
    plot: bool = False
    json: bool = False
    estimate: bool = False
    calibrate: bool = False
    resume: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written to config.json."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunOptions:
        """The inverse of ``to_dict``."""
        known = {field.name for field in fields(cls)}
        training = dict(values["training"])
        for name in ("hidden", "class_weights"):
            training[name] = tuple(training.get(name, ()))
        rest = {name: value for name, value in values.items() if name in known and name != "training"}
        return cls(training=TrainingConfig(**training), **rest)


def _widths(text: str) -> tuple[int, ...]:
    """128,64 as (128, 64)."""
    try:
        return tuple(int(width) for width in text.split(",") if width.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be whole numbers separated by commas, such as 128,64"
        ) from None


def _usual(protocol: str, found: dict[str, Any], training: TrainingConfig, run: RunOptions) -> dict[str, Any]:
    """What holds for options that are not given: those of images and embeddings, or those of tables."""
    hidden = bool(found.get("hidden"))
    if found["data"] in EMBEDDED_TABLES and found["embeddings"] is None and protocol in ("g_bmf", "g_shuff", "plain"):
        rows, width = EMBEDDED_TABLES[found["data"]]
        clipped = found["row_rule"] in (None, "clip")
        epsilon = found["epsilon"] if 0 < found["epsilon"] < LARGEST_EPSILON else training.epsilon  # else refused later
        bound = table_row_bound(width) if clipped else run.row_bound
        averaging = (
            averaging_fits(protocol, found.get("weights", "secret"))
            and found["average"] is None
            and found["learning_rate"] is None  # a stated rate was chosen for what it gives
            and not found["patience"]  # the last fifth is not known before the end
        )
        regression = found.get("task") == "regression"
        chosen = training_defaults(rows, epsilon, hidden=hidden, regression=regression, averaging=averaging)
        return {"row_rule": "clip", "row_bound": bound, **chosen}
    rate = MLP_LEARNING_RATE if hidden else training.learning_rate
    usual = {"epochs": training.epochs, "batch_size": training.batch_size, "learning_rate": rate}
    return {"row_rule": run.row_rule, "row_bound": run.row_bound, "average": training.average, **usual}


def _numbers(text: str) -> tuple[float, ...]:
    """1,3 as (1.0, 3.0)."""
    try:
        return tuple(float(number) for number in text.split(",") if number.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers separated by commas, such as 1,3") from None


def parse_options(protocol: str, description: str | None, argv: list[str] | None = None) -> RunOptions:
    """Read the command line of one protocol."""
    parser = argparse.ArgumentParser(
        prog=f"python -m protocols.{protocol}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version_option(parser)
    default, run = TrainingConfig(), RunOptions(protocol, TrainingConfig())
    data = parser.add_argument_group("data")
    data.add_argument("--data", choices=DATA_SETS, default=run.data, help="data set, split vertically (default digits)")
    data.add_argument("--data-root", metavar="DIR", help="where data sets that are not embedded lie")
    data.add_argument("--embeddings", metavar="FILE", help="precomputed embeddings (.npz) instead of --data")
    data.add_argument("--clients", type=int, default=run.clients, help="number of clients; the last holds the labels")
    data.add_argument(
        "--local-model", choices=LOCAL_MODELS, default=run.local_model, help="frozen model at each client"
    )
    data.add_argument("--local-weights", metavar="FILE", help="weights of the local model, from public data")
    data.add_argument(
        "--row-bound", type=float, help="public bound R on the norm of each row (default 1; tables 4·√width)"
    )
    data.add_argument(
        "--row-rule",
        choices=("clip", "normalise"),
        help="how rows are brought within R (default normalise; tables clip)",
    )
    train = parser.add_argument_group("training")
    train.add_argument("--epochs", type=int, help=f"default {default.epochs}; of tables by rows and ε (vfl.defaults)")
    train.add_argument("--batch-size", type=int, help=f"default {default.batch_size}; of tables by rows")
    train.add_argument("--learning-rate", type=float, help="default 2, which suits one layer; 0.5 with --hidden")
    train.add_argument("--schedule", choices=("constant", "linear", "cosine"), default=default.schedule)
    train.add_argument(
        "--setting", type=int, choices=tuple(SETTINGS), help="the paper's workload 1 or 2 (momentum 0.9)"
    )
    train.add_argument("--momentum", type=float, default=default.momentum)
    train.add_argument("--weight-decay", type=float, default=default.weight_decay, help="α; 1 means none")
    train.add_argument(
        "--gradients",
        choices=("factored", "explicit"),
        default=default.gradients,
        help="explicit builds every per-sample gradient, as the paper does: the reference, 60 times the bytes",
    )
    if protocol in ("g_bmf", "g_shuff", "gl_bmf", "plain"):
        shown = protocol != "gl_bmf"  # which has them to say why it cannot (protocols.plan.combinations)
        train.add_argument(
            "--task",
            choices=TASKS,
            help="classification (default), binary (two classes as one logit: half the bytes) or regression (default of diabetes)"
            if shown
            else argparse.SUPPRESS,
        )
        train.add_argument(
            "--class-weights",
            type=_numbers,
            default=default.class_weights,
            metavar="W,W",
            help="public weights of the classes' gradients, before the clip; not computed from private labels"
            if shown
            else argparse.SUPPRESS,
        )
        train.add_argument(
            "--hidden",
            type=_widths,
            default=default.hidden,
            metavar="N,N",
            help="widths of hidden layers, such as 128,64 (ReLU); default: one linear layer"
            if shown
            else argparse.SUPPRESS,
        )
    train.add_argument(
        "--seed", type=int, default=default.seed, help="splits, an MLP's start, the twin; never masks or noise"
    )
    if protocol in ("g_bmf", "g_shuff", "gl_bmf"):
        train.add_argument(
            "--weights",
            choices=("open", "secret"),
            default="open",
            help="open (default): every noised gradient sum is opened, so weights are public while training; same claim, fewer"
            " rounds and bytes. secret: only the last model is opened, to the clients",
        )
    if protocol in ("g_bmf", "g_shuff"):
        train.add_argument(
            "--average",
            choices=AVERAGES,
            help="give the mean of the models of the last fifth of all steps, or an exponential average, instead of the last one"
            " (open weights; costs no privacy; default none, of tables fifth unless a rate is stated)",
        )
        train.add_argument(
            "--public-fraction",
            type=float,
            default=run.public_fraction,
            metavar="F",
            help="declare this part of the training rows public: they are not trained on, and accuracy and loss on them are"
            " measured after every epoch (open weights; costs no privacy)",
        )
        train.add_argument(
            "--patience",
            type=int,
            default=run.patience,
            metavar="EPOCHS",
            help="stop when so many epochs have not raised the accuracy on the public rows, and give the best model",
        )
    privacy = parser.add_argument_group("privacy")
    privacy.add_argument("--epsilon", type=float, default=default.epsilon)
    privacy.add_argument("--delta", type=float, default=default.delta)
    privacy.add_argument(
        "--rows-per-person",
        type=int,
        default=default.rows_per_person,
        metavar="K",
        help="the most rows that one person may have: ε and δ are about people, with more noise",
    )
    privacy.add_argument("--clip-norm", type=float, default=default.clip_norm, help="γ, the bound on each gradient")
    if protocol in ("g_bmf", "g_shuff"):
        privacy.add_argument(
            "--noise",
            choices=("distributed", "joint"),
            default=default.noise,
            help="distributed: each server adds its own, 1.5σ² in all, free. joint: σ², unknown to all, 1.4 kB a parameter",
        )
    if protocol in ("g_bmf", "g_shuff", "gl_bmf"):
        privacy.add_argument(
            "--order",
            choices=ORDERS,
            default=default.order,
            help="fixed (default): everybody knows the batches. secret: rows and dummies are shuffled once, in secret; less noise"
            " for the same claim"
            if protocol == "g_bmf"
            else argparse.SUPPRESS,
        )
    if protocol == "g_shuff":
        privacy.add_argument(
            "--accounting",
            choices=("proven", "any-order", "paper"),
            default=default.accounting,
            help="which ε calibrates the noise: that proven for the secret order (default), one proven for any order (no amplification),"
            " or the paper's, as if batches were Poisson samples, which nothing proves",
        )
    elif protocol in ("g_bmf", "gl_bmf"):
        privacy.add_argument(
            "--factorisation",
            choices=KINDS,
            default=default.factorisation,
            help="of the workload",
        )
        privacy.add_argument(
            "--bands",
            type=int,
            help="bands of the factorisation (default: from the batches, or by σ·RMSE with a secret order)",
        )
    if protocol == "gl_bmf":
        local = parser.add_argument_group("local models")
        local.add_argument(
            "--local-update",
            choices=("released", "estimated"),
            default=run.local_update,
            help="what clients do with their gradient: apply it (claim on features and labels), or the paper's estimate",
        )
        local.add_argument("--local-learning-rate", type=float, default=run.local_learning_rate)
        local.add_argument("--rank", type=int, default=run.rank, help="rank of the LoRA layers")
        local.add_argument("--lora-alpha", type=float, default=run.lora_alpha, help="LoRA scaling is α/rank")
        local.add_argument(
            "--lora-layers",
            metavar="LAYERS",
            default=run.lora_layers,
            help="blocks of the local model that LoRA reads: all (default), first, last, or numbers from 1, as 1,2",
        )
        local.add_argument(
            "--train-layer",
            metavar="NAME",
            help="instead of LoRA layers, train this layer of the local model by its Jacobians (cnn: one; small layers only)",
        )
        local.add_argument(
            "--jacobian-bound",
            type=float,
            default=run.jacobian_bound,
            help="public bound on the Jacobian of that layer, per row",
        )
    where = parser.add_argument_group("where and how")
    where.add_argument("--parties", choices=("processes", "threads"), default=run.parties)
    where.add_argument("--network", choices=("loopback", "lan", "wan"), default=run.network, help="emulated network")
    if protocol == "g_bmf":
        where.add_argument(
            "--backend",
            choices=("refmpc", "mpspdz"),
            default=run.backend,
            help="mpspdz: also let the MP-SPDZ at MPSPDZ_HOME execute the same steps, and compare the weights (small runs)",
        )
    where.add_argument("--tls", action="store_true", help="mutual TLS between all participants (own certificates)")
    where.add_argument("--timeout", type=float, default=run.timeout, help="seconds to wait for a silent peer")
    where.add_argument("--out", default=run.out, metavar="DIR", help="runs are kept here (default runs/)")
    where.add_argument("--checkpoint-every", type=int, default=0, metavar="STEPS", help="0: no checkpoints")
    if protocol in ("g_bmf", "g_shuff", "gl_bmf"):
        where.add_argument(
            "--durability",
            choices=("process", "power"),
            default=run.durability,
            help="open weights with checkpoints: what is written before it is opened survives the end of a process (default),"
            " or a power failure too",
        )
    where.add_argument("--resume", metavar="DIR", help="continue the run in DIR (all other options come from there)")
    where.add_argument("--estimate", action="store_true", help="print what the run would cost, and run nothing")
    if protocol in ("g_bmf", "g_shuff"):
        where.add_argument(
            "--calibrate",
            action="store_true",
            help="with --estimate: run a few steps of this shape here, and say how long the run would take over --network",
        )
    where.add_argument(
        "--twin",
        action="store_true",
        help="also train the plaintext twin with the servers' noise and compare (one machine only)",
    )
    where.add_argument("--plot", action="store_true", help="draw costs by phase as PNG")
    where.add_argument("--json", action="store_true", help="print JSON instead of tables")
    found = vars(parser.parse_args(argv))
    setting = found.pop("setting")
    if setting is not None:
        found.update(SETTINGS[setting])
    if found.get("task") is None:
        found["task"] = "regression" if found["data"] in NUMBERS and found["embeddings"] is None else default.task
    usual = _usual(protocol, found, default, run)
    found |= {name: value for name, value in usual.items() if found.get(name) is None}
    names = {field.name for field in fields(TrainingConfig)}
    try:
        training = TrainingConfig(**{name: value for name, value in found.items() if name in names})
        options = RunOptions(protocol, training, **{k: v for k, v in found.items() if k not in names})
        if options.resume is not None and not (Path(options.resume) / "config.json").exists():
            parser.error(f"--resume {options.resume}: no config.json there, so no run to continue")
    except InvalidArgument as error:
        parser.error(str(error))
    return options
