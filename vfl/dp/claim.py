"""The claim: what a run may say about its privacy, with its assumptions, as one immutable object."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from accel.validate import require, require_choice, require_real

__all__ = [
    "CHANGED_LABEL",
    "OUTSIDE_EVERY_CLAIM",
    "PUBLIC_BY_ASSUMPTION",
    "ZERO_OUT",
    "Claim",
    "Figure",
    "labels_only_claim",
]

ZERO_OUT = "zero-out: one record's contribution is there or is not"
CHANGED_LABEL = "one record's label changed"
PUBLIC_BY_ASSUMPTION = (
    "local models and all preprocessing constants are public or come from other data",
    "the row bound is enforced by the clients",
)
OUTSIDE_EVERY_CLAIM = (
    "tuning on the private data (clip norm, learning rate, epochs)",
    "membership in the aligned table, which all clients know",
)


@dataclass(frozen=True)
class Figure:
    """A further (ε, δ) next to the headline one: what it says, whether it is proved, where it comes from."""

    name: str
    epsilon: float
    delta: float
    proven: bool
    source: str


@dataclass(frozen=True)
class Claim:
    """(ε, δ)-DP of everything a run releases, against ``adversary``, for neighbours ``neighbouring``.

    ``proven`` is False when ε rests on an assumption the run does not meet (as-if-Poisson accounting).
    ``gaussian_multiplier`` is the σ of one Gaussian mechanism that covers the run (proven), so that a
    budget can compose runs exactly; None when there is no such mechanism. ``slack_delta`` is the part of
    δ that is not the Gaussian's, (1+e^ε)·``statistical_distance``, and ``epsilon_addition`` that of ε.
    """

    mechanism: str
    epsilon: float
    delta: float
    neighbouring: str
    epsilon_replace_one: float
    participation: str
    adversary: str
    covers: str
    noise_multiplier: float
    sensitivity: float
    proven: bool = True
    gaussian_multiplier: float | None = None
    slack_delta: float = 0.0
    statistical_distance: float = 0.0
    epsilon_addition: float = 0.0
    row_bound: float | None = None
    figures: tuple[Figure, ...] = ()
    slack: tuple[tuple[str, float], ...] = ()
    public: tuple[str, ...] = PUBLIC_BY_ASSUMPTION
    outside: tuple[str, ...] = OUTSIDE_EVERY_CLAIM
    caveats: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        require_real("epsilon", self.epsilon, 0, open_low=True)
        require_real("delta", self.delta, 0, 1, open_low=True, open_high=True)
        require_real("noise_multiplier", self.noise_multiplier, 0, open_low=True)
        require(
            0 <= self.slack_delta < self.delta,
            "slack_delta",
            self.slack_delta,
            f"in [0, delta = {self.delta:g})",
            "the arithmetic leaves no room: more noise bits, wider ranges or a larger delta",
        )

    def proven_pair(self) -> tuple[float, float]:
        """(ε, δ) that is proved: the headline, else the best proved figure; what a budget charges."""
        if self.proven:
            return self.epsilon, self.delta
        return min(((f.epsilon, f.delta) for f in self.figures if f.proven), default=(math.inf, self.delta))

    def paragraph(self) -> str:
        """The claim in a few sentences, for a data-protection officer."""
        status = "" if self.proven else "NOT a proven bound for what runs: "
        lines = [
            f"{status}Everything this run releases is ({_number(self.epsilon)}, {self.delta:.3g})-"
            f"differentially private for {self.covers} ({self.neighbouring}), against {self.adversary}.",
            f"If a record is replaced by another one instead, ε is {_number(self.epsilon_replace_one)}."
            if self.neighbouring == ZERO_OUT
            else "",
            f"Mechanism: {self.mechanism}; noise multiplier {self.noise_multiplier:.5g}, "
            f"sensitivity {self.sensitivity:.6g}; {self.participation}.",
        ]
        for figure in self.figures:
            proof = "proved" if figure.proven else "not proved"
            lines.append(f"{figure.name}: ({_number(figure.epsilon)}, {figure.delta:.3g}), {proof} ({figure.source}).")
        if self.slack:
            parts = ", ".join(f"{name} {value:.2g}" for name, value in self.slack)
            lines.append(f"Fixed-point arithmetic is included: {parts}.")
        lines += [f"{caveat}." for caveat in self.caveats]
        if self.row_bound is not None:
            lines.append(f"Rows are clipped to norm {self.row_bound:g} by the clients.")
        lines.append(f"Assumed: {'; '.join(self.public)}.")
        lines.append(f"Outside the claim: {'; '.join(self.outside)}.")
        return " ".join(line for line in lines if line)

    def to_json(self) -> str:
        """The claim as JSON; infinite numbers become the string "inf"."""
        return json.dumps(_plain(dataclasses.asdict(self)), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Claim:
        """The inverse of ``to_json``."""
        fields: dict[str, Any] = json.loads(text, object_hook=_numbers)
        fields["figures"] = tuple(Figure(**figure) for figure in fields["figures"])
        for name in ("slack", "sources"):
            fields[name] = tuple((str(key), value) for key, value in fields[name])
        for name in ("public", "outside", "caveats"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


def labels_only_claim(claim: Claim, local_update: str = "estimated") -> Claim:
    """The claim of GL-BMF with estimated local updates, from the claim of the same noise with frozen models.

    A client's update from the estimate uses its raw rows, so its later embeddings depend on them un-
    noised: features are not covered (proofs §8.1). Labels are: a changed label moves a contribution by
    2γ, hence the replace-one ε of ``claim`` becomes the headline.
    """
    require_choice("local_update", local_update, ("estimated",), "'released' keeps the full claim")
    require(claim.covers != "labels only", "claim", claim.covers, "a claim that covers features and labels")
    half = None if claim.gaussian_multiplier is None else claim.gaussian_multiplier / 2
    return dataclasses.replace(
        claim,
        epsilon=claim.epsilon_replace_one,
        neighbouring=CHANGED_LABEL,
        covers="labels only",
        gaussian_multiplier=half,
        figures=tuple(f for f in claim.figures if f.proven and "outsider" not in f.name),
        caveats=(
            *claim.caveats,
            "Features are NOT covered: local updates use each client's raw rows (local_update=estimated); "
            "choose local_update=released for a claim on features too",
        ),
        sources=(
            *claim.sources,
            ("labels only", "proofs §8.2: a changed label has sensitivity 2·clip_norm"),
        ),
    )


def _number(value: float) -> str:
    return "unbounded" if math.isinf(value) else f"{value:.4g}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def _numbers(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: math.inf if value == "inf" else value for key, value in fields.items()}
