"""The text of a new federation.toml. Comments say what a value means and who must agree on it."""

from __future__ import annotations

import json
from collections.abc import Sequence

__all__ = ["federation_text"]

_HEAD = """\
# Everybody in this federation has the same copy of this file; nothing in it is secret. Keys are not in it.
# All participants compare a hash of it before anything is shared, except for how a peer is reached (host, port,
# alignment, timeout), which may differ behind a firewall.

[federation]
name = {name}
version = 1 # of this file's format

# The three servers compute on secret shares. At most one of them may be corrupted: they should belong to different
# organisations. Each is recognised by the SHA-256 of its certificate, wherever it is; `ppvfl pin` writes it.
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
# width: number of columns that the client shares (`ppvfl check` prints it; outputs of its local model, if it has one). alignment: where the label
# client listens for the other clients while ids are matched (private set intersection); the others only call.
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
{label}# class_weights = [1.0, 3.0] # public, of the classes' gradients before the clip; never computed from the private labels
# privacy: the claim is printed before a run, and kept with the model
epsilon = 3.0
delta = 1e-5            # well below one over the number of people
rows_per_person = 1     # the most rows that one person may have; with more, ε and δ are about people, and the noise grows
clip_norm = 1.0         # bound on each row's gradient
row_bound = "auto"      # bound on the norm of each person's row, all clients together; "auto": 4·√(sum of widths)
row_rule = "clip"       # how rows are brought within it: "clip" (long ones are shrunk) or "normalise" (all have this norm, which
                        # suits embeddings and images; of a client's one or two columns it leaves little but signs)
# training; "auto": from the number of common rows and epsilon, at about 100 to 500 steps (docs/choosing-a-mechanism.md)
epochs = "auto"
batch_size = "auto"
learning_rate = "auto"
average = "auto"        # with open weights (not gl_bmf): "fifth", the model is the mean over the last fifth of all steps;
                        # "exponential"; "none", it is the last one. "auto": "fifth" with an automatic rate, else "none"
held_out = {held_out}          # share of the common rows that takes no part, for `ppvfl predict --held-out`
# public_rows, patience: `ppvfl public-rows` writes them here; rows that are public are measured on after every epoch, for no epsilon
schedule = "constant"   # or "linear", "cosine"
momentum = 0.0
weight_decay = 1.0      # 1 means none: the weights are multiplied by it at every step
hidden = []             # widths of hidden layers
factorisation = "bisr"  # of the workload, for g_bmf: "bisr", "bsr", "toeplitz" (optimised) or "identity"
# bands = 8             # of the factorisation; without it, from the number of batches
# order = "fixed"       # of g_bmf's batches. "secret": rows and dummies are shuffled once, and less noise is needed
# accounting = "proven" # of g_shuff: for its secret order; "any-order": no amplification; "paper": not proven
# for gl_bmf only: the clients' layers (LoRA, on their own scaled columns)
# rank = 8
# lora_alpha = 8.0      # the layers count lora_alpha/rank
# local_learning_rate = 0.05
# local_update = "released" # or "estimated", the paper's: the claim then covers labels only, not features
# operation
# matching = "ot"       # of the clients' ids: "ot" (transfers of keys, AES, hashes), or "ecdh" (every id blinded by every client: 60 times the work)
# weights = "open"      # every noised gradient sum is opened, so that the weights are public while they are trained; same
                        # claim, less work. "secret": only the last model is opened, to the clients (gl_bmf: and own gradients)
# checkpoint_every = 100 # steps between checkpoints, from which a server that died resumes; 0: none (with open weights,
                        # and in gl_bmf, every step is kept whatever is said here)
# maximum_rows = 100000000 # common rows that a plan is made for
timeout = 60.0          # seconds to wait for a silent peer

[predict]
receiver = {receiver} # the only client that receives predictions
maximum_rows = 100000   # of one request

# What may be spent in all on each client's people, over all runs that name the same people: every server keeps the sum and
# refuses a run that would exceed it. Without this section the sum is kept and shown, and nothing is refused.
# [budget]
#   epsilon = 10.0
#   delta = 1e-5
#   people = "everybody"  # whose data it is; another word for a federation about other people
"""

_CLASSES = """\
classes = {classes}
# task = "regression"   # instead of classes: the label is a number. Two classes are one logit (task = "binary") where it can be
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
    """``servers`` are (host, port), ``clients`` (name, width, alignment address); the last client holds the labels. With a
    ``target_range`` the label is a number, and ``classes`` are not used."""
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
    parts.append(_RUN.format(label=label, receiver=receiver, held_out=held_out))
    return "".join(parts)
