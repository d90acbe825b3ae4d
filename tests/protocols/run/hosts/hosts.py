"""Where the participants of end-to-end tests run."""

from bench.soak.hosts import ROOT, Host, Processes, can_make_namespaces, loopback, namespaces, plug

__all__ = ["ROOT", "Host", "Processes", "can_make_namespaces", "loopback", "namespaces", "plug"]
