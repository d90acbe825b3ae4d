"""What each method can do, in words that options ask for: no code of a method is imported for it."""

from __future__ import annotations

from dataclasses import dataclass

from accel.validate import require_choice

__all__ = ["FACTS", "SECURE", "Facts", "facts"]


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
        Facts("g_bmf", "G-BMF", _FROZEN | {"correlated noise", "a secret order", "MP-SPDZ"}),
        Facts("g_shuff", "G-Shuff", _FROZEN | {"a new order in every epoch"}),
        Facts("gl_bmf", "GL-BMF", frozenset({"servers", "correlated noise", "layers"})),
        Facts("plain", "Plain", frozenset({"losses", "hidden layers", "frozen rows"})),
        Facts("ldp", "LDP-G", frozenset()),
    )
}
SECURE = tuple(name for name, entry in FACTS.items() if entry.takes("servers"))


def facts(name: str, argument: str = "protocol") -> Facts:
    """Those of the method called ``name``."""
    return FACTS[require_choice(argument, name, FACTS)]
