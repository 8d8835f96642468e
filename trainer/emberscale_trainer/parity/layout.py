"""Where parity is: which segments of which servers are in a stripe, and which server holds the parity of it.

The members of a group are its servers, numbered from 0. Stripe `s` of a table has a segment of every member but one,
which holds the parity of the stripe. That is another one for each stripe, so that all hold as much: the left-symmetric
rotation of RAID 5, shifted by the table so that tables of a single segment are spread, too.

A member without rows in a stripe adds nothing to its parity: empty slots are zero.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ParityLayout:
    """The stripes of a group of `members`, two or more."""

    members: int

    def __post_init__(self) -> None:
        if self.members < 2:
            raise ValueError(f"parity takes two servers or more, not {self.members}")

    def holder(self, table: int, stripe: int) -> int:
        """Returns the member that holds the parity of a stripe."""
        return (stripe + table) % self.members

    def stripe(self, member: int, table: int, segment: int) -> int:
        """Returns the stripe that a member's segment is in. Its segments skip the stripes whose parity it holds."""
        whole, rest = divmod(segment, self.members - 1)
        held = (member - table) % self.members
        return whole * self.members + rest + (rest >= held)

    def lane(self, member: int, table: int, segment: int) -> int:
        """Returns who holds the parity of a member's segment."""
        return self.holder(table, self.stripe(member, table, segment))
