"""The placement of parity on the members of a group.

The members of a group are its servers, numbered from 0, in a ring: the last one is followed by the first. A stripe of a
table has a segment each of a few adjacent members. The members that follow them are its *holders*, which keep the
parity of the stripe: one for each server that may be lost at a time. The holders of the next stripe begin one member
later, shifted by the table, so all members hold equally much, also of tables with a single segment. In a small group, a
stripe has a segment of every member but its holders: the left-symmetric rotation of RAID 5 and 6.

So a member sends the changes of its rows to the few members that follow it, however large the group is.

A member without rows in a stripe adds nothing to its parity: empty slots are zero.
"""

from dataclasses import dataclass
from functools import cache

from emberscale_api.job import MOST_STRIPE_WIDTH, stripe_width


@dataclass(frozen=True)
class ParityLayout:
    """The stripes of a group of `members` with this `parity`, 1 or 2. Raises ValueError for others.

    `most_width`: the most members that have segments in a stripe.
    """

    members: int
    parity: int = 1
    most_width: int = MOST_STRIPE_WIDTH

    def __post_init__(self) -> None:
        if self.parity not in (1, 2):
            raise ValueError(f"parity is 1 or 2, not {self.parity}")
        if self.members <= self.parity:
            raise ValueError(f"parity {self.parity} takes {self.parity + 1} servers or more, not {self.members}")

    @property
    def width(self) -> int:
        """How many members have a segment in each stripe."""
        return stripe_width(self.members, self.parity, self.most_width)

    def holders(self, member: int) -> tuple[int, ...]:
        """Returns the members that hold parity of a member's rows, ascending."""
        return self._within_reach(member, 1)

    def sources(self, member: int) -> tuple[int, ...]:
        """Returns the members of whose rows a member holds parity, ascending."""
        return self._within_reach(member, -1)

    def _within_reach(self, member: int, direction: int) -> tuple[int, ...]:
        distances = range(1, self.width + self.parity)
        return tuple(sorted((member + direction * distance) % self.members for distance in distances))

    def role(self, member: int, table: int, stripe: int) -> int | None:
        """Returns which of a stripe's parity blocks a member holds, from 0; None if it holds none of them."""
        distance = (member - table - stripe) % self.members
        return distance if distance < self.parity else None

    def has_segment(self, member: int, table: int, stripe: int) -> bool:
        """Whether a member has a segment in a stripe."""
        return self.position(member, table, stripe) >= 0

    def position(self, member: int, table: int, stripe: int) -> int:
        """Returns the position in the stripe of a member's segment, from 0; less if it has none there."""
        return (member - table - stripe) % self.members - (self.members - self.width)

    def stripe(self, member: int, table: int, segment: int) -> int:
        """Returns the stripe that a member's segment is in."""
        whole, rest = divmod(segment, self.width)
        return whole * self.members + self._round_of(member, table)[rest]

    def segment(self, member: int, table: int, stripe: int) -> int | None:
        """Returns the member's segment in a stripe, as the inverse of `stripe`; None if it has none there."""
        if not self.has_segment(member, table, stripe):
            return None
        whole, rest = divmod(stripe, self.members)
        return whole * self.width + self._round_of(member, table).index(rest)

    def _round_of(self, member: int, table: int) -> tuple[int, ...]:
        return _round(self.members, self.width, (member - table) % self.members)

    def lane(self, member: int, table: int, segment: int) -> int:
        """Returns the lane of a member's segment: one of `width`, by the holders of its parity."""
        return (self.stripe(member, table, segment) + table - member - 1) % self.members

    def lanes_to(self, member: int, holder: int) -> tuple[int, ...]:
        """Returns the lanes of a member whose segments another one holds parity of, by its role in them."""
        lanes = ((holder - role - member - 1) % self.members for role in range(self.parity))
        return tuple(lane for lane in lanes if lane < self.width)

    def lost_rows(self, lost: frozenset[int], table: int, stripe: int) -> tuple[int, ...]:
        """Returns the lost members that have a segment in the stripe, ascending."""
        return tuple(member for member in sorted(lost) if self.has_segment(member, table, stripe))

    def decoder(self, lost: frozenset[int], table: int, stripe: int) -> int:
        """Returns the role of the holder that decodes the rows of lost members in a stripe.

        That is the first holder that is left where one block is enough, and the last one where two are.
        """
        if len(self.lost_rows(lost, table, stripe)) > 1:
            return self.parity - 1
        return next(role for role in range(self.parity) if (stripe + table + role) % self.members not in lost)

    def decoding_member(self, lost: frozenset[int], table: int, stripe: int) -> int:
        """Returns the member that decodes the rows of lost members in a stripe."""
        return (stripe + table + self.decoder(lost, table, stripe)) % self.members


@cache
def _round(members: int, width: int, member: int) -> tuple[int, ...]:
    """Returns the first stripes of table 0 in which a member has segments, one for each holder, in their order.

    Members prefer the same stripes, so that few blocks hold the parity of segments that do not fill a whole round.
    """
    stripes = [(member + distance) % members for distance in range(1, width + 1)]
    return tuple(sorted(stripes, key=lambda stripe: (stripe % width, stripe)))
