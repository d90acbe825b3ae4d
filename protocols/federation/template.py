"""The text of a new federation.toml. Comments say what a value means and who must agree on it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from protocols.settings import template_lines

__all__ = ["federation_text"]

_HEAD = """\
# Everybody in this federation has the same copy of this file; nothing in it is secret. Keys are not in it.
# All participants compare a hash of it before anything is shared, except for how a peer is reached (host, port,
# alignment, timeout), which may differ behind a firewall, and for certificates, of which files must have one in common.

[federation]
name = {name}
version = 1 # of this file's format

# The three servers compute on secret shares. At most one of them may be corrupted: they should belong to different
# organisations. Each is recognised by the SHA-256 of its certificate, wherever it is; `ppvfl pin` writes it. While a
# key is replaced `ppvfl pin --until` writes earlier_fingerprint and earlier_until, too: both are accepted until then.
"""

_SERVER = """\
[[server]]
id = {id}
host = {host}
port = {port}
fingerprint = ""

"""

_CLIENTS = """\
# The clients hold the data. Columns are put side by side in this order, those of the label client last.
# width: number of columns that the client shares (`ppvfl check` prints it; outputs of its local model, if it has one).
# alignment: where the label client listens for the other clients while ids are matched (private set
# intersection); the others only call.
"""

_CLIENT = """\
[[client]]
name = {name}
label = {label}
width = {width}
alignment = {alignment}
fingerprint = ""

"""

_RUN = """\
[run]
protocol = "g_bmf"      # "g_bmf": matrix-factorisation noise; "g_shuff": rows shuffled in secret in every epoch;
                        # "gl_bmf": as g_bmf, and each client trains a layer of its own, so clients stay until the end
{label}{options}
[predict]
receiver = {receiver} # the only client that receives predictions
maximum_rows = 100000   # of one request

# What may be spent in all on each client's people, over all runs at these servers: every server keeps the sum and
# refuses a run that would exceed it. Without this section the sum is kept and shown, and nothing is refused.
# [budget]
#   epsilon = 10.0
#   delta = 1e-5
#   people = "everybody"  # whose data it is
#   apart_from = []       # `people` of earlier runs that do not count: theirs are other people, all participants state
"""

_CLASSES = """\
classes = {classes}
# instead of classes, the label can be a number: task = "regression", and
# target_range = [0.0, 100.0] # of that number, public; values beyond it count as its ends
"""

_NUMBER = """\
task = "regression"     # the label is a number; without this, classes = ["no", "yes"]
target_range = [{low!r}, {high!r}] # of that number, public; values beyond it count as its ends
"""


def federation_text(
    name: str,
    servers: Sequence[tuple[str, int]],
    clients: Sequence[tuple[str, int, str]],
    classes: int | Sequence[str],
    held_out: float = 0.0,
    target_range: tuple[float, float] | None = None,
) -> str:
    """``servers`` are (host, port), ``clients`` (name, width, alignment address); the last client holds the labels.
    With a ``target_range`` the label is a number, and ``classes`` are not used."""
    quoted = json.dumps  # the escapes of JSON are those of TOML's basic strings
    parts = [_HEAD.format(name=quoted(name))]
    parts += [_SERVER.format(id=i, host=quoted(host), port=port) for i, (host, port) in enumerate(servers)]
    parts.append(_CLIENTS)
    for i, (client, width, alignment) in enumerate(clients):
        label = "true" if i == len(clients) - 1 else "false"
        parts.append(_CLIENT.format(name=quoted(client), label=label, width=width, alignment=quoted(alignment)))
    shown = str(classes) if isinstance(classes, int) else quoted(list(classes))
    comment = 'labels 0, 1, …; or the label texts, ["no", "yes"]' if isinstance(classes, int) else "the label texts"
    receiver = quoted(clients[-1][0]) if clients else '""'
    label = _CLASSES.format(classes=f"{shown} # {comment}")
    if target_range is not None:
        label = _NUMBER.format(low=float(target_range[0]), high=float(target_range[1]))
    options = template_lines({"held_out": held_out})
    parts.append(_RUN.format(label=label, receiver=receiver, options=options))
    return "".join(parts)
