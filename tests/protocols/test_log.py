"""A log that can be written nowhere: whoever logs goes on, also the threads that nobody would miss at once."""

from __future__ import annotations

import errno
import io
import sys
from pathlib import Path

import pytest

from protocols.log import Log


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("kind", ["full", "closed", "a pipe that nobody reads"])
@pytest.mark.parametrize("to_file", [False, True])
def test_a_line_that_cannot_be_written_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_file: bool, kind: str
) -> None:
    """A server whose stderr and log lay on its full disk ended with the line that was to say that the disk is full."""
    log = Log("server-0", tmp_path / "logs" / "server-0.log" if to_file else None)
    stream = Full()
    if kind == "closed":
        stream.close()
    elif kind != "full":
        monkeypatch.setattr(stream, "write", lambda text: (_ for _ in ()).throw(BrokenPipeError()))
    if to_file:
        (tmp_path / "logs" / "server-0.log").unlink()
        (tmp_path / "logs").rmdir()
    monkeypatch.setattr(sys, "stderr", stream)
    log.error("this server cannot go on for now", errno="ENOSPC")
    log.info("waiting", peer="bank")
    assert [found["event"] for found in log.last_errors] == [
        "this server cannot go on for now"
    ]  # on its page, and in memory
