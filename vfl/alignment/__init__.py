"""Private alignment: which rows of several clients are about the same people, and in which common order.

Clients match their ids by a Diffie-Hellman private set intersection. One client (the label client) leads; every other
client, a member, has one connection to it. What everybody learns is the intersection, its size and the lengths of the
lists (``pad_to`` hides those); with more than two clients the leader also learns how large the overlaps of some of the
lists are, but not of whom they consist. See ``vfl.alignment.protocol`` for the messages and the argument.
"""

from vfl.alignment.ids import encode_ids
from vfl.alignment.link import Alignment, align_as_leader, align_as_member
from vfl.alignment.protocol import AlignmentError

__all__ = ["Alignment", "AlignmentError", "align_as_leader", "align_as_member", "encode_ids"]
