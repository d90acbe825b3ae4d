"""What the fork server of a local run does once, so that servers and clients start warm.

Importing the protocols is half of it. The other half is compiled kernels: small trainings run here
(``protocols.run.warm_up``), so that every process forked from this one has their kernels. On a machine that has none
yet they are compiled here, once, instead of in three servers at the same time.
"""

from __future__ import annotations

import contextlib

from protocols.run.warm_up import KINDS, warm_up

__all__: list[str] = []

with contextlib.suppress(Exception):  # a fork server must start: what is wrong here shows in the servers
    for training, classes in KINDS[:3]:  # what an open regression needs is among it
        warm_up(training, classes)
