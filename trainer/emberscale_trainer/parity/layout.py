"""The placement of parity on the members of a group.

The members of a group are its servers, numbered from 0. A stripe of a table has a segment of every member except its
holders, which keep the parity of the stripe: one for each server that may be lost at a time. The holders of a stripe
are adjacent, and those of the next stripe begin one member later, so that all members hold equally much: the
left-symmetric rotation of RAID 5 and 6, shifted by the table so that tables of a single segment are spread, too.

A member without rows in a stripe adds nothing to its parity: empty slots are zero.
"""

from dataclasses import dataclass

from emberscale_trainer.parity.code import MOST_POSITIONS


@dataclass(frozen=True)
class ParityLayout:
    """The stripes of a group of `members` with this `parity`, 1 or 2. Raises ValueError for others."""

    members: int
    parity: int = 1

    def __post_init__(self) -> None:
        if self.parity not in (1, 2):
            raise ValueError(f"parity is 1 or 2, not {self.parity}")
        if self.members <= self.parity:
            raise ValueError(f"parity {self.parity} takes {self.parity + 1} servers or more, not {self.members}")
        if self.parity > 1 and self.members - self.parity > MOST_POSITIONS:
            raise ValueError(f"parity 2 takes {2 + MOST_POSITIONS} servers at most, not {self.members}")

    def role(self, member: int, table: int, stripe: int) -> int | None:
        """Returns which of a stripe's parity blocks a member holds, from 0; None if it has a segment in the stripe."""
        distance = self._distance(member, table, stripe)
        return distance if distance < self.parity else None

    def position(self, member: int, table: int, stripe: int) -> int:
        """Returns the position in the stripe of a member that has a segment in it."""
        return self._distance(member, table, stripe) - self.parity

    def stripe(self, member: int, table: int, segment: int) -> int:
        """Returns the stripe that a member's segment is in. Its segments skip the stripes whose parity it holds."""
        whole, rest = divmod(segment, self.members - self.parity)
        for held in sorted((member - table - role) % self.members for role in range(self.parity)):
            rest += rest >= held
        return whole * self.members + rest

    def segment(self, member: int, table: int, stripe: int) -> int | None:
        """Returns the member's segment in a stripe, as the inverse of `stripe`; None if it holds parity of it."""
        if self.role(member, table, stripe) is not None:
            return None
        whole, rest = divmod(stripe, self.members)
        skipped = sum((member - table - role) % self.members < rest for role in range(self.parity))
        return whole * (self.members - self.parity) + rest - skipped

    def lane(self, member: int, table: int, segment: int) -> int:
        """Returns the first holder of the parity of a member's segment."""
        return (self.stripe(member, table, segment) + table) % self.members

    def lanes_to(self, holder: int) -> tuple[int, ...]:
        """Returns the lanes whose segments a member holds parity of, by its role in them."""
        return tuple((holder - role) % self.members for role in range(self.parity))

    def lost_rows(self, lost: frozenset[int], table: int, stripe: int) -> tuple[int, ...]:
        """Returns the lost members that have a segment in the stripe, ascending."""
        return tuple(member for member in sorted(lost) if self.role(member, table, stripe) is None)

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

    def _distance(self, member: int, table: int, stripe: int) -> int:
        return (member - table - stripe) % self.members
