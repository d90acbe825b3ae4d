"""Whose data a client shares, for the servers' record of what was spent on whom: a keyed tag of its list of ids.

Two runs on the same list of people have the same tag, whatever the columns, their order and the common rows are. The
key is the client's own and stays in its ``--state``, beside the states of all configurations: to the servers a tag is a
random number.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from accel.files import Damaged, private_folder, read_bytes, write_bytes

__all__ = ["people_tag"]

KEY = "people.key"
KEY_BYTES = 32


def people_tag(states: Path, client: str, ids: Sequence[str]) -> str:
    """64 hexadecimal digits; draws the key in ``states`` if it is not there."""
    file = states / KEY
    if not file.exists():
        private_folder(states)
        drawn = states / f"{KEY}.{secrets.token_hex(8)}"
        write_bytes(drawn, secrets.token_bytes(KEY_BYTES), private=True, sealed=True)
        with contextlib.suppress(FileExistsError):  # another process of this client was first: its key counts
            os.link(drawn, file)
        drawn.unlink()
    key = read_bytes(file)
    if len(key) != KEY_BYTES:
        raise Damaged(file, f"it has {len(key)} bytes, expected {KEY_BYTES}", "bring it back from a backup")
    mac = hmac.new(key, f"people of {client}".encode(), "sha256")
    for identifier in sorted(ids):
        mac.update(b"\0" + identifier.encode())
    return mac.hexdigest()
