"""Notice a client that comes back with other rows: a keyed hash of its columns, kept by the servers, compared on
resume.

At the first upload each server draws a salt for every client and keeps it. The client gets the three salts, and sends
all servers tag = HMAC-SHA256(s_0 ⊕ s_1 ⊕ s_2, its fixed-point columns); they keep it beside the salt (mode 0600). When
the run is resumed they send the same salts, and the tag must be the same: otherwise everybody stops before anything is
shared. The client keeps nothing, and no row is uploaded twice for it to be noticed.

Who sees what: a server knows its own salt and the tag. The sum of the two other salts is uniform to it, so the tag is a
pseudo-random number: it cannot try out values, and over several attempts it learns whether the columns were equal, and
nothing else. Other clients get other salts.

What this is for: a file that was edited, sorted anew or exchanged, a local model that was loaded with other weights.
What it is not for: nothing ties the tag to the shares that follow, so a client that lies consistently (sends the old
tag, and shares other rows) is not noticed; clients follow the protocol here as everywhere (proofs §1.1).
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from accel.errors import InvalidArgument
from accel.files import read_arrays, write_arrays
from protocols.state.checkpoint import ServerDirectory
from refmpc import Client, Party
from refmpc.core.rounds import Round
from refmpc.net.framing import listed, title

__all__ = ["ColumnsChanged", "check_columns", "commit_to_columns"]

SALT_BYTES = 32
TAG_BYTES = 32


class ColumnsChanged(InvalidArgument):
    """Some ``clients`` came back with other columns: everybody stops, and everybody knows who it was."""

    def __init__(self, text: str, clients: Sequence[str] = ()):
        super().__init__(text)
        self.clients = tuple(clients)


def commit_to_columns(client: Client, clients: Sequence[str], columns: Iterable[np.ndarray]) -> None:
    """The client's part: three salts come, the tag of ``columns`` (ring words) goes, and the servers' verdict on all
    ``clients`` comes: if one is refused, nobody shares anything."""
    salts = [np.empty(SALT_BYTES, dtype=np.uint8) for _ in range(3)]
    client.collect("salt", {server: [salt] for server, salt in enumerate(salts)})
    mac = hmac.new((salts[0] ^ salts[1] ^ salts[2]).tobytes(), client.name.encode(), "sha256")
    for words in columns:
        mac.update(f"|{words.shape}|".encode())
        mac.update(np.ascontiguousarray(words).data)
    tag = np.frombuffer(mac.digest(), dtype=np.uint8)
    client.transport.exchange("commitment", {server: [tag] for server in range(3)}, {})
    verdicts = [np.empty(len(clients), dtype=np.uint8) for _ in range(3)]
    client.collect("verdict", {server: [verdict] for server, verdict in enumerate(verdicts)})
    _require_equal(clients, np.bitwise_or.reduce(verdicts))


def check_columns(party: Party, directory: ServerDirectory, clients: Sequence[str]) -> None:
    """The servers' part: keep every client's tag, or refuse the run if one differs from what any of them kept."""
    files = [directory.path / f"commitment-{index:02d}.npz" for index in range(len(clients))]
    kept = [_kept(file) for file in files]
    tags = [np.empty(TAG_BYTES, dtype=np.uint8) for _ in clients]
    with party.phase("commitments"):
        for name, (salt, _) in zip(clients, kept, strict=True):
            party.send("salt", name, [salt])
        for name, tag in zip(clients, tags, strict=True):
            party.receive("commitment", name, [tag])
        differs = np.array(
            [
                before is not None and not hmac.compare_digest(before.tobytes(), tag.tobytes())
                for (_, before), tag in zip(kept, tags, strict=True)
            ],
            dtype=np.uint8,
        )
        # one server may have died before it kept a tag: all go by what any of them knows, and only then keep the new
        # ones
        differs |= _others(party, differs)
        for name in clients:
            party.send("verdict", name, [differs])
    _require_equal(clients, differs)
    for file, (salt, before), tag in zip(files, kept, tags, strict=True):
        if before is None:
            write_arrays(file, {"salt": salt, "tag": tag}, private=True, sealed=True)


def _kept(file: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """This server's salt for a client, drawn once, and the client's tag if it has sent one."""
    if not file.exists():
        salt = np.frombuffer(secrets.token_bytes(SALT_BYTES), dtype=np.uint8)
        write_arrays(file, {"salt": salt}, private=True, sealed=True)
    arrays = read_arrays(file)
    return arrays["salt"], arrays.get("tag")


def _others(party: Party, differs: np.ndarray) -> np.ndarray:
    round_ = Round("verdicts")
    round_.send_next(differs)
    round_.send_previous(differs)
    theirs = round_.expect_next(differs.shape, np.uint8), round_.expect_previous(differs.shape, np.uint8)
    party.deliver(round_)
    either: np.ndarray = theirs[0] | theirs[1]
    return either


def _require_equal(clients: Sequence[str], differs: np.ndarray) -> None:
    changed = [name for name, verdict in zip(clients, differs, strict=True) if verdict]
    if changed:
        who = listed(map(title, changed))
        raise ColumnsChanged(
            f"{who} came back with different columns; restore that data (rows, order, local model) or start a new run",
            changed,
        )
