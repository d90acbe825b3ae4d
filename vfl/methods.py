"""What each method can do, in words that options ask for: no code of a method is imported for it."""

from __future__ import annotations

from dataclasses import dataclass

from accel.validate import require_choice

__all__ = ["FACTS", "GL_BMF", "GL_SUB", "G_BMF", "G_SHUFF", "LDP", "PLAIN", "SECURE", "Facts", "facts"]

G_BMF, G_SHUFF, GL_BMF, PLAIN, LDP = "g_bmf", "g_shuff", "gl_bmf", "plain", "ldp"
GL_SUB = "gl_sub"  # a baseline among the twins, not a method that users run


@dataclass(frozen=True)
class Facts:
    """``can``: what options may need of a method (``vfl.settings.Setting.needs``)."""

    name: str
    title: str
    can: frozenset[str]

    def takes(self, needs: str) -> bool:
        """Whether an option that needs this means something here."""
        return not needs or needs in self.can


_FROZEN = frozenset(
    {"servers", "losses", "hidden layers", "averages", "joint noise", "public rows", "timing", "frozen rows"}
)
FACTS = {
    entry.name: entry
    for entry in (
        Facts(G_BMF, "G-BMF", _FROZEN | {"correlated noise", "a secret order", "MP-SPDZ"}),
        Facts(G_SHUFF, "G-Shuff", _FROZEN | {"a new order in every epoch"}),
        Facts(GL_BMF, "GL-BMF", frozenset({"servers", "correlated noise", "layers"})),
        Facts(PLAIN, "Plain", frozenset({"losses", "hidden layers", "frozen rows"})),
        Facts(LDP, "LDP-G", frozenset()),
    )
}
_BASELINES = {GL_SUB: Facts(GL_SUB, "GL-Sub", frozenset())}
SECURE = tuple(name for name, entry in FACTS.items() if entry.takes("servers"))


def facts(name: str, argument: str = "protocol") -> Facts:
    """Those of the method called ``name``."""
    return _BASELINES[name] if name in _BASELINES else FACTS[require_choice(argument, name, FACTS)]
