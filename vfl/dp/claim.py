"""The claim: what a run may say about its privacy, with its assumptions, as one immutable object."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from dataclasses import dataclass
from typing import Any

from accel.validate import require, require_choice, require_real

__all__ = [
    "CHANGED_LABEL",
    "NO_CLAIM",
    "OUTSIDE_EVERY_CLAIM",
    "PUBLIC_BY_ASSUMPTION",
    "ROW_BOUND_CHECKED",
    "ROW_BOUND_CHECKED_IN_STEPS",
    "ROW_BOUND_TRUSTED",
    "WARNING",
    "WEAK_EPSILON",
    "ZERO_OUT",
    "Claim",
    "DeltaWarning",
    "Figure",
    "labels_only_claim",
    "with_delta_checked",
    "zero_out",
]

NO_CLAIM = "no claim: a simulation, its noise can be repeated"
ZERO_OUT = "zero-out: one record's contribution is there or is not"
CHANGED_LABEL = "one record's label changed"
ROW_BOUND_TRUSTED = "the row bound is enforced by the clients"
ROW_BOUND_CHECKED = "the row bound, and the form of labels, is checked by the servers before training (proofs §11)"
ROW_BOUND_CHECKED_IN_STEPS = (
    "the row bound is checked by the servers in every step, the form of labels once (proofs §11.6)"
)
PUBLIC_BY_ASSUMPTION = (
    "local models and all preprocessing constants are public or come from other data",
    ROW_BOUND_TRUSTED,
)
OUTSIDE_EVERY_CLAIM = (
    "tuning on the private data (clip norm, learning rate, epochs)",
    "membership in the aligned table, which all clients know",
)


def zero_out(rows_per_person: int) -> str:
    """The neighbouring relation where a person may have several rows."""
    if rows_per_person == 1:
        return ZERO_OUT
    return f"zero-out: one person's contribution, up to {rows_per_person} rows, is there or is not"


WEAK_EPSILON = 10.0
WARNING = "WARNING: "  # begins a caveat that must be shown before a run, not only kept with it
_NO_CLAIM, _PROVEN_EPSILON = "no_claim", "proven_epsilon"


class DeltaWarning(UserWarning):
    """δ is so large that (ε, δ) would allow to publish somebody's record as it is."""


@dataclass(frozen=True)
class Figure:
    """A further (ε, δ) next to the headline one: what it says, whether it is proved, where it comes from.

    ``narrower``: it holds against fewer people, or for less, than the claim speaks of, so it never stands in
    for the headline. ``epsilon_replace_one`` is its ε for a replaced record.
    """

    name: str
    epsilon: float
    delta: float
    proven: bool
    source: str
    epsilon_replace_one: float = math.inf
    narrower: bool = False


@dataclass(frozen=True)
class Claim:
    """(ε, δ)-DP of everything a run releases, against ``adversary``, for neighbours ``neighbouring``.

    ``proven`` is False when ε rests on an assumption the run does not meet; ``presumes`` then says which.
    ``gaussian_multiplier`` is the σ of one Gaussian mechanism that covers the run (proven), so that a
    budget can compose runs exactly; None when there is no such mechanism. ``slack_delta`` is the part of
    δ that is not the Gaussian's, (1+e^ε)·``statistical_distance``, and ``epsilon_addition`` that of ε.
    ``simulated``: the noise comes from a seed, or one process has seen it, so nothing is claimed; every text and JSON
    then begins with ``NO_CLAIM``, and the rest describes a run between servers with the same settings.
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
    presumes: str = ""
    gaussian_multiplier: float | None = None
    slack_delta: float = 0.0
    statistical_distance: float = 0.0
    epsilon_addition: float = 0.0
    row_bound: float | None = None
    rows_per_person: int = 1
    figures: tuple[Figure, ...] = ()
    slack: tuple[tuple[str, float], ...] = ()
    public: tuple[str, ...] = PUBLIC_BY_ASSUMPTION
    outside: tuple[str, ...] = OUTSIDE_EVERY_CLAIM
    caveats: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    simulated: bool = False

    def __post_init__(self) -> None:
        require_real("epsilon", self.epsilon, 0, open_low=True)
        require_real("delta", self.delta, 0, 1, open_low=True, open_high=True)
        require_real("noise_multiplier", self.noise_multiplier, 0, open_low=True)
        require(
            0 <= self.slack_delta < self.delta,
            "slack_delta",
            self.slack_delta,
            f"in [0, delta = {self.delta:g})",
            "the fixed-point arithmetic uses up delta: take more noise bits, wider ranges or a larger delta",
        )

    def proven_pair(self) -> tuple[float, float]:
        """(ε, δ) that is proved: the headline, else the best proved figure; what a budget charges."""
        best = self._proven_figure()
        if self.simulated:
            return math.inf, self.delta
        if self.proven or best is None:
            return (self.epsilon if self.proven else math.inf), self.delta
        return best.epsilon, best.delta

    @property
    def proven_epsilon(self) -> float | None:
        """ε of ``proven_pair``; None if none is proved."""
        epsilon = self.proven_pair()[0]
        return epsilon if math.isfinite(epsilon) else None

    def _proven_figure(self) -> Figure | None:
        found = (f for f in self.figures if f.proven and not f.narrower)
        return min(found, key=lambda f: f.epsilon, default=None)

    @property
    def unproven_because(self) -> str:
        """What the headline rests on, to be said wherever it is shown; empty if it is proved."""
        if self.simulated:
            return NO_CLAIM
        return "" if self.proven else self.presumes or "not proven for what runs"

    @property
    def _whose(self) -> str:
        return "a record is" if self.rows_per_person == 1 else "all rows of a person are"

    def headline(self) -> str:
        """One line for tables, curves and logs: the proved ε first, an unproven one named as such."""
        if self.simulated:
            return f"{NO_CLAIM} (noise as for {self._as_real().headline()})"
        if self.proven:
            return f"ε = {_number(self.epsilon)}, δ = {self.delta:g}; {self.neighbouring}"
        best = self._proven_figure()
        proof = (
            "no ε is proven for all that is released"
            if best is None
            else f"proven ε = {_number(best.epsilon)}, δ = {best.delta:g} ({_lower(best.name)})"
        )
        return f"{proof}; ε = {_number(self.epsilon)} {self.unproven_because}; {self.neighbouring}"

    def paragraph(self) -> str:
        """The claim in a few sentences, for a data-protection officer."""
        if self.simulated:
            return (
                f"{NO_CLAIM}. A run between three servers with the same settings would claim: "
                f"{self._as_real().paragraph()}"
            )
        status = "" if self.proven else f"NOT a proven bound for what runs ({self.headline()}): "
        lines = [
            f"{status}Everything this run releases is ({_number(self.epsilon)}, {self.delta:.3g})-"
            f"differentially private for {self.covers} ({self.neighbouring}), against {self.adversary}"
            f"{'' if self.proven else f', {self.unproven_because}'}.",
            f"If {self._whose} replaced by {'another one' if self.rows_per_person == 1 else 'others'} instead, ε is "
            f"{_number(self.epsilon_replace_one)}."
            if self.neighbouring == zero_out(self.rows_per_person)
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
            lines.append(
                f"Rows count as of norm {self.row_bound:g} at most: clients clip or normalise them, and their "
                f"rounding and the tolerance of "
                "the servers' test are included."
            )
        lines.append(f"Assumed: {'; '.join(self.public)}.")
        lines.append(f"Outside the claim: {'; '.join(self.outside)}.")
        return " ".join(line for line in lines if line)

    def __repr__(self) -> str:
        return self.paragraph()

    def as_simulation(self) -> Claim:
        """What a simulation of this run says: nothing is claimed."""
        return dataclasses.replace(self, simulated=True)

    def _as_real(self) -> Claim:
        return dataclasses.replace(self, simulated=False)

    def to_json(self) -> str:
        """The claim as JSON, and the ε that is proved; infinite numbers become the string "inf"."""
        fields: dict[str, Any] = {_NO_CLAIM: NO_CLAIM} if self.simulated else {}
        fields |= dataclasses.asdict(self) | {_PROVEN_EPSILON: self.proven_epsilon}
        del fields["simulated"]  # the first field says it
        return json.dumps(_plain(fields), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Claim:
        """The inverse of ``to_json``."""
        fields: dict[str, Any] = json.loads(text, object_hook=_numbers)
        fields.pop(_PROVEN_EPSILON, None)  # follows from the others
        fields["simulated"] = fields.pop(_NO_CLAIM, None) is not None
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
    2γ, hence the replace-one ε of ``claim`` and of its figures; a figure that has none is left out.
    """
    require_choice("local_update", local_update, ("estimated",), "'released' keeps the full claim")
    require(claim.covers != "labels only", "claim", claim.covers, "a claim that covers features and labels")
    half = None if claim.gaussian_multiplier is None else claim.gaussian_multiplier / 2
    figures = (
        dataclasses.replace(f, epsilon=f.epsilon_replace_one, epsilon_replace_one=math.inf)
        for f in claim.figures
        if math.isfinite(f.epsilon_replace_one)
    )
    return dataclasses.replace(
        claim,
        epsilon=claim.epsilon_replace_one,
        neighbouring=CHANGED_LABEL
        if claim.rows_per_person == 1
        else f"labels of one person's records, up to {claim.rows_per_person}, changed",
        covers="labels only",
        noise_multiplier=claim.noise_multiplier / 2,
        sensitivity=2 * claim.sensitivity,
        gaussian_multiplier=half,
        figures=tuple(figures),
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


def with_delta_checked(claim: Claim, num_samples: int) -> Claim:
    """``claim`` as it is if δ < 1/n and ε ≤ 10; else with a caveat, and for δ a ``DeltaWarning`` for who runs the
    command."""
    if claim.epsilon > WEAK_EPSILON:
        sentence = (
            f"epsilon = {claim.epsilon:.4g} is above {WEAK_EPSILON:g}: an attacker who knows all other records may "
            "become e^ε times surer of one, which is next to no protection; up to about 3 is usual, and 8 is much"
        )
        claim = dataclasses.replace(claim, caveats=(WARNING + sentence, *claim.caveats))
    if claim.delta * num_samples < 1:
        return claim
    better = 10.0 ** (math.floor(-math.log10(num_samples)) - 1)
    sentence = (
        f"delta = {claim.delta:g} is not below 1/n for the n = {num_samples} records: such a claim would allow to "
        f"publish one of them unchanged; choose delta = {better:g} or less"
    )
    warnings.warn(sentence, DeltaWarning, stacklevel=2)
    return dataclasses.replace(claim, caveats=(WARNING + sentence, *claim.caveats))


def _lower(name: str) -> str:
    return name[:1].lower() + name[1:]


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
