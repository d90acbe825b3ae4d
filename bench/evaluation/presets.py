"""The two ways to run a cell: as in the paper, and as we would.

``paper``: the 1000 logits of each client, B = 128, γ = 1.2, η = 0.01, BSR with p = b, noise of variance σ² that nobody
knows; the row bound is so wide that it never acts, as the paper has none.
``ours``: the same data, local models, ε and δ; what differs was chosen on public data (``bench.paper choose``, see
``bench.evaluation.choose``), never on the private test rows. Its noise is the one our servers make, whose variance an
outsider sees as 1.5σ²: the comparison is at our expense. Runs of 100 epochs have settings that were chosen for 100
epochs (``LONG``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vfl.local.client import LocalUpdate
from vfl.training import SETTINGS, TrainingConfig

__all__ = ["BASELINE_RATES", "LONG", "PRESETS", "Preset", "preset_for"]


@dataclass(frozen=True)
class Preset:
    """All of a run but data, method, ε, epochs and seed.

    ``momentum_rate`` multiplies η in Setting 2, ``ldp_rate`` in the LDP methods, whose clients bring the rows of all
    their columns together to ``ldp_bound`` (the paper: each client to γ = 1.2). Noise on every coordinate of every row
    wants fewer coordinates than noise on a gradient: ``ldp_projection`` of them.
    """

    name: str
    title: str
    features: str
    projection: int
    row_bound: float
    row_rule: str
    training: TrainingConfig
    momentum_rate: float
    local_rate: float
    ldp_bound: float
    ldp_projection: int
    ldp_rate: float
    lora_alpha: float
    regularisation: str

    def config(self, setting: int, **changes: object) -> TrainingConfig:
        """The training of Setting 1 (β = 0) or 2 (β = 0.9)."""
        rate = self.training.learning_rate * (self.momentum_rate if setting == 2 else 1.0)
        return self.training.with_(learning_rate=rate, **SETTINGS[setting]).with_(**changes)

    def update(self, kind: str, setting: int) -> LocalUpdate:
        """What a client does with the released gradient of its layers. Estimates come from U's equations alone: an
        r×r solve a step; those of V would cost a hundred times as much for r more rows of a d_i-row matrix.
        """
        return LocalUpdate(
            kind,
            learning_rate=self.local_rate * (self.momentum_rate if setting == 2 else 1.0),
            momentum=SETTINGS[setting]["momentum"],
            regularisation=self.regularisation,
            parts="U" if kind == "estimated" else "UV",
        )


PRESETS = {
    "paper": Preset(
        "paper", "the paper's settings", features="logits", projection=0, row_bound=1000.0, row_rule="clip",
        training=TrainingConfig(
            batch_size=128, learning_rate=0.01, clip_norm=1.2, factorisation="bsr", noise="joint", dtype="float32",
            accounting="paper",
        ),
        momentum_rate=1.0, local_rate=0.001, ldp_bound=1.2 * 2**0.5, ldp_projection=0, ldp_rate=1.0, lora_alpha=1.0,
        regularisation="paper",
    ),
    "ours": Preset(
        "ours", "our settings", features="penultimate", projection=256, row_bound=1.0, row_rule="normalise",
        training=TrainingConfig(
            batch_size=1000, learning_rate=32.0, clip_norm=0.5, factorisation="toeplitz", noise="distributed",
            schedule="linear", dtype="float32",
        ),
        momentum_rate=0.1, local_rate=0.2, ldp_bound=1.0, ldp_projection=64, ldp_rate=0.25, lora_alpha=8.0,
        regularisation="mmse",
    ),
}  # fmt: skip

# Chosen on the stand-in at 100 epochs: ``bench.paper choose --epochs 100``.
_OURS = PRESETS["ours"]
LONG = {"ours": replace(_OURS, training=_OURS.training.with_(learning_rate=32.0, clip_norm=0.125))}
_LONG_EPOCHS = 100


def preset_for(name: str, epochs: int) -> Preset:
    """The preset of this name for a run of this many epochs."""
    return LONG.get(name, PRESETS[name]) if epochs >= _LONG_EPOCHS else PRESETS[name]


# Learning rates (a client's, the server's) of the methods that are set against ours, chosen on the same public
# stand-in.
BASELINE_RATES = {
    "admm": (5.0, 0.001),
    "fedbcd": (20.0, 0.0005),
    "split": (80.0, 0.0005),
    "ada_vfed": (0.05, 0.0005),
}
