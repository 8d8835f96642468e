"""One server's part in a group that keeps parity of its members' rows, as pure state, without rows and streams.

    meeting -> filling -> whole -> (members are lost) -> withdrawing -> agreed
                                -> (one is lost, whose rows follow on demand) -> keys are told, agreed -> withdrawing
       another table, or another assignment -> over

A member greets each other member with a first item. Once all have answered, it sends the holders of its parity one
numbered item for one or several pushes; `lag` says which items they must have before a push is answered. Until then
pushes wait for nobody: no row is protected yet, and members that cannot reach each other train on without parity until
they can. In large groups, some members hold no parity of it; they get only the items that all members need.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from emberscale_trainer.parity.holding import Batch, Holding, SourceOverError
from emberscale_trainer.parity.layout import ParityLayout
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.stream.core import StreamLostError

_Deltas = TypeVar("_Deltas")

Reached = Callable[[int], int]
"""Returns, for another member, the item up to which it has acknowledged all that go to it, as `GroupCore.reached`."""

_PARITY_STREAM = 1 << 63
_LAYOUT = 1 << 62
"""Marks streams by the placement of `ParityLayout`."""
_SERVERS = 1 << 10


class GroupCore(Generic[_Deltas]):
    """The part of member `me` in a group with this layout, of whose members any `layout.parity` may be lost.

    * `holding`: the parity that it holds for others. `put_count`: the number of its last item.
    * `others`: all other members except lost ones. `holders`: those that hold parity of its rows; they get all items.
    * `has_met`: all others have answered, so that pushes are sent to them. `lost`: the members that count as lost.
    * `has_told`: the holders know the keys in its rows, or will.
    * `has_withdrawn`: it has withdrawn its rows, and sends nothing more, as the others accept nothing more.
    * `is_over`: another group, or none, has replaced this one.
    """

    def __init__(self, me: int, layout: ParityLayout, holding: Holding[_Deltas]) -> None:
        self.holding = holding
        self._me = me
        self._layout = layout
        self.others = tuple(member for member in range(layout.members) if member != me)
        self.holders = layout.holders(me)
        self._get_all = frozenset(self.holders)
        self.is_over = False
        self.has_met = False
        self._whole = False
        self.lost: frozenset[int] = frozenset()
        self.has_told = False
        self.has_withdrawn = False
        self.put_count = 0
        self._to_all: list[int] = []
        self._received: dict[int, int] = {}
        self._withdrawing: set[int] = set()
        self._marks: dict[int, dict[int, int]] = {}
        self._sent_halves: set[int] = set()

    @property
    def is_whole(self) -> bool:
        """Whether all rows of this server are protected."""
        return self._whole and not self.lost and not self.is_over

    @property
    def sends_pushes(self) -> bool:
        """Whether the changes of pushes are sent to others."""
        return self.has_met and not self.has_withdrawn

    @property
    def is_filling(self) -> bool:
        """Whether earlier rows may still be sent."""
        return not self.lost and not self.is_over

    def end(self) -> None:
        """Ends the group; nothing waits for it any more."""
        self.is_over = True

    # What this member sends

    def put(self, *, to_all: bool = False) -> int:
        """Numbers the next item, which goes to the holders or to all other members."""
        self.put_count += 1
        if to_all:
            self._to_all.append(self.put_count)
        return self.put_count

    def sent_to(self, member: int, number: int) -> int:
        """Returns how many of the items up to this one go to a member."""
        return number if member in self._get_all else bisect_right(self._to_all, number)

    def reached(self, member: int, count: int) -> int:
        """Returns the last item before the first that a member lacks, if it has `count` items."""
        if member in self._get_all:
            return count
        return self._to_all[count] - 1 if count < len(self._to_all) else self.put_count

    def yet_to_meet(self, reached: Reached) -> tuple[int, ...]:
        """Returns the members that have yet to answer the first item."""
        return tuple(member for member in self.others if not reached(member))

    def meet(self) -> None:
        """Notes that all others have answered: the next item has the batches in the rows so far, and pushes follow."""
        self.has_met = True

    def filled(self) -> None:
        """Notes that the holders have all earlier rows, and know the batches in them."""
        self._whole = True

    def stored(self, reached: Reached) -> int:
        """Returns the last item that all holders have."""
        return min(map(reached, self.holders), default=self.put_count)

    def waits_for(self, number: int, reached: Reached, *, all_others: bool = False) -> tuple[int, ...]:
        """Returns the holders, or all other members, that lack items up to this one: a push is answered after that.

        Returns none before the members have met, and once the group is over.
        """
        if self.is_over or not self.has_met:
            return ()
        members = self.others if all_others else self.holders
        return tuple(member for member in members if reached(member) < number)

    def told_columns(self) -> None:
        """Notes that this member has told all keys of its rows."""
        self.has_told = True

    def withdrew(self) -> None:
        """Notes that this member has withdrawn all its rows, and has told the holders."""
        self.has_withdrawn = True

    # What others send. All methods raise SourceOverError once nothing is accepted any more.

    def begin(self, source: int, batches: AppliedBatches) -> None:
        """As `Holding.begin`."""
        self._taking()
        self.holding.begin(source, batches)

    def take(self, source: int, stored: int, batches: Sequence[Batch], deltas: _Deltas) -> None:
        """As `Holding.take`."""
        self._taking()
        self.holding.take(source, stored, batches, deltas)

    def take_withdrawal(self, source: int, deltas: _Deltas) -> None:
        """As `take`, for rows that the member takes out of the parity; it can no longer be rebuilt itself."""
        self._taking()
        self.holding.take_at_once(source, deltas)
        self._withdrawing.add(source)

    def take_columns(self, source: int) -> None:
        """Notes the keys in a member's rows: the parity keeps what the member has sent until all keys are known.

        The member can no longer be rebuilt itself. Raises also what `Holding.pause` does.
        """
        self._taking()
        self.holding.pause(source)
        self._withdrawing.add(source)

    def marked(self, source: int, received: Mapping[int, int]) -> None:
        """Notes that a member has told all keys of its rows. `received` is as of `withdrawn`."""
        self.take_columns(source)
        self._marks[source] = dict(received)

    def withdrawn(self, source: int, received: Mapping[int, int]) -> None:
        """Notes that a member has withdrawn its rows. `received` has the number of its items by lost member."""
        self._taking()
        self.holding.withdraw(source)
        self._marks[source] = dict(received)

    def sent_halves(self, source: int) -> None:
        """Notes that a member has sent all parity that others need to decode the rows of two lost members."""
        self._taking()
        self._sent_halves.add(source)

    def _taking(self) -> None:
        if self.is_over:
            raise SourceOverError("the group is over")

    # The loss of members

    def lose(self, lost: frozenset[int]) -> dict[int, int]:
        """Declares members lost, permanently; returns what the others must learn of them by `withdrawn`.

        Raises NotHeldError if their rows cannot be rebuilt from this member's parity.
        """
        if self.is_over or not self._whole or self.lost not in (frozenset(), lost):
            raise NotHeldError("this server's rows are not protected")
        if len(lost) > self._layout.parity:
            raise NotHeldError(f"{len(lost)} servers are lost, and parity covers {self._layout.parity}")
        if gone := lost & self._withdrawing:
            raise NotHeldError(f"{len(gone)} of the lost servers had begun to take their rows out of the parity")
        self.lost = lost
        self.others = tuple(member for member in self.others if member not in lost)
        self.holders = tuple(member for member in self.holders if member not in lost)
        self._received = {member: self.holding.lose(member) for member in sorted(lost)}
        return self._received

    def agreed(self) -> dict[int, AppliedBatches] | None:
        """Returns the batches in the rows of each lost member of which this one holds parity, once others agree.

        All others have reported how many items they have from each lost member; items that some of its holders lack are
        dropped. Returns None until then. Raises NotHeldError.
        """
        self.require()
        if not self.lost or not set(self.others) <= self._marks.keys():
            return None
        marks = {member: self._marks[member] for member in self.others}
        if any(named.keys() != self.lost for named in marks.values()):
            raise NotHeldError("the servers do not agree on which ones are lost")
        marks[self._me] = self._received
        found = sorted(self.lost.intersection(self._layout.sources(self._me)))
        for lost in found:
            holders = self._layout.holders(lost)
            self.holding.agree(lost, min(received[lost] for member, received in marks.items() if member in holders))
        return {lost: self.holding.applied(lost) for lost in found}

    def has_only_lost_rows(self) -> bool:
        """Whether all other live members have withdrawn their rows. Raises NotHeldError."""
        self.require()
        return all(self.holding.is_withdrawn(member) for member in self.others)

    def has_halves(self) -> bool:
        """Whether this member has received all parity that it needs to decode rows. Raises NotHeldError."""
        self.require()
        return len(self.lost) < 2 or set(self.others) <= self._sent_halves

    def require(self) -> None:
        """Raises NotHeldError once the group is over."""
        if self.is_over:
            raise NotHeldError("the group is over")


def is_parity_stream(stream: int) -> bool:
    """Whether a row stream carries deltas for parity, rather than rows of a move."""
    return bool(stream & _PARITY_STREAM)


def parity_stream(version: int, source: int) -> int:
    """Returns the 64-bit number of the row stream of a server's deltas under a routing table of this version.

    Servers that place parity otherwise, as earlier versions do, do not know the stream, so that they never meet.
    """
    return _PARITY_STREAM | _LAYOUT | version * _SERVERS | source


def source_of(stream: int, generation: int, newest: tuple[int, int], members: tuple[int, ...]) -> int | None:
    """Returns the member that sends a parity stream of a generation; `newest` and `members` are this server's group.

    Returns None if this server has not begun the stream's group yet. Raises StreamLostError for an earlier group.
    """
    version, source = (stream & ~(_PARITY_STREAM | _LAYOUT)) // _SERVERS, stream % _SERVERS
    if newest < (generation, version) or not stream & _LAYOUT:
        return None
    if newest > (generation, version) or source not in members:
        raise StreamLostError(f"server {source} is not of the group of version {newest[1]}")
    return members.index(source)
