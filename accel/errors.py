"""The errors of this project. They live in ``accel`` because that is the one package that every other may import.

A command shows these as one sentence. Any other exception, a plain ``ValueError`` of numpy included, is a bug of ours
and is shown with its traceback. ::

    PpvflError
    ├── InvalidArgument (ValueError)        what a user gave: an option, a file, a value (`require` raises it)
    │   ├── accel.files.Damaged             a file of ours that is not what was written
    │   ├── vfl.tables.ColumnsError         a client's file that cannot be used as it is
    │   ├── protocols.federation.schema.ConfigurationError   a value in federation.toml
    │   │   └── protocols.net.credentials.RoleError          a certificate of another participant
    │   ├── protocols.state.audit_log.AuditError             an audit log that is not what was written
    │   ├── protocols.state.commitment.ColumnsChanged        a client came back with different columns
    │   ├── protocols.server.verification.UploadRefused      rows or labels that the claim does not cover
    │   └── protocols.state.checkpoint.CannotResume          going on would release something twice
    ├── refmpc.RefmpcError (RuntimeError)   what happens between parties; it may work the next time
    │   ├── refmpc.PeerLost, refmpc.PeerTimeout, refmpc.PeerAborted, refmpc.OutOfStep
    │   ├── refmpc.HandshakeError           refused before anything secret was sent
    │   │   └── protocols.net.wire.Refused, protocols.run.hosts.server_sync.Different
    │   ├── refmpc.ReleaseRefused, refmpc.SharesDiffer, refmpc.RangeError, refmpc.NotRecordable
    │   ├── refmpc.PartyFailed              what `refmpc.run` raises in the caller; `summary` has no tracebacks
    │   └── protocols.net.uplink.UploadLost
    ├── vfl.tables.cells.Misread            a cell of a table; shown as a ColumnsError, which names file and column
    ├── vfl.alignment.AlignmentError (RuntimeError)   a client that does not follow the alignment, or went away
    │   └── vfl.alignment.AlignmentRefused            it is not tried again
    ├── vfl.dp.BudgetExceededError (RuntimeError)     the run would spend more than the ledger allows
    ├── protocols.plan.plausibility.Impossible        an opened value that clip, noise and steps do not allow
    ├── protocols.state.disk.NoRoom (OSError)         a disk that is almost full; it may work later
    ├── protocols.run.hosts.planning.StillPlanning    a plan that takes longer; ask again later
    ├── protocols.run.timing_run.TrialFailed          a short training for an estimate that did not end
    ├── bench.soak.__main__.SoakFailed, bench.soak.watch.OpenedTwice   a training under faults that went wrong
    └── bench.mpspdz.runner.MpSpdzError, bench.spu.runner.SpuError, bench.evaluation.sources.NotThere
"""

from __future__ import annotations

__all__ = ["InvalidArgument", "PpvflError"]


class PpvflError(Exception):
    """Base class of all errors that this project raises on purpose."""

    @property
    def summary(self) -> str:
        """The error for people, with the notes that were added on the way (how to go on)."""
        return "\n".join([str(self), *getattr(self, "__notes__", ())])


class InvalidArgument(PpvflError, ValueError):
    """Something that was given to us cannot be used; names it, its value, what is allowed, and the way out."""
