"""Private alignment: which rows of several clients are about the same people, and in which common order.

Clients match their ids by a private set intersection, in one of two ways behind one interface. ``ot`` (the default): an
oblivious pseudo-random function from 512 base transfers a pair of clients, AES and hashes (``vfl.alignment.ot``).
``ecdh``: every id is blinded by every client on Curve25519 (``vfl.alignment.ecdh``), some sixty times as much work. One
client (the label client) leads; every other client, a member, has one connection to it. What everybody learns is the
intersection, its size and the lengths of the lists (``pad_to`` hides those); with "ecdh" and more than two clients the
leader also learns how large the overlaps of some of the lists are, but not of whom they consist.
"""

from vfl.alignment.base_ot import has_the_group
from vfl.alignment.ids import encode_ids
from vfl.alignment.link import Alignment, PeerTls, align_as_leader, align_as_member, rehearse
from vfl.alignment.steps import MATCHINGS, AlignmentError, AlignmentRefused, matching_costs

__all__ = [
    "MATCHINGS",
    "Alignment",
    "AlignmentError",
    "AlignmentRefused",
    "PeerTls",
    "align_as_leader",
    "align_as_member",
    "encode_ids",
    "has_the_group",
    "matching_costs",
    "rehearse",
]
