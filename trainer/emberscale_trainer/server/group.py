"""One server's part in a group that keeps parity of its members' rows, as pure state, without rows and streams.

    meeting -> filling -> whole -> (members are lost) -> withdrawing -> agreed
       another table, or another assignment -> over

A member greets each other one with a first item. Once all have answered, it sends one numbered item to each of them for
each push, and a push is answered once all of them have its item. Until then pushes wait for nobody: no row is protected
yet, and members that cannot reach each other train on without parity until they do.
"""

from collections.abc import Mapping
from typing import Generic, TypeVar

from emberscale_trainer.parity.holding import Batch, Holding, SourceOverError
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.stream.core import StreamLostError

_Deltas = TypeVar("_Deltas")

_PARITY_STREAM = 1 << 63
_SERVERS = 1 << 10


class GroupCore(Generic[_Deltas]):
    """The part of member `me` in a group of `members`, of which any `parity` may be lost.

    `holding` is what it holds for the others.
    """

    def __init__(self, me: int, members: int, holding: Holding[_Deltas], parity: int = 1) -> None:
        self.holding = holding
        self._me = me
        self._parity = parity
        self._others = tuple(member for member in range(members) if member != me)
        self._over = False
        self._met = False
        self._whole = False
        self._lost: frozenset[int] = frozenset()
        self._withdrew = False
        self._put = 0
        self._received: dict[int, int] = {}
        self._withdrawing: set[int] = set()
        self._marks: dict[int, dict[int, int]] = {}
        self._told: set[int] = set()

    @property
    def is_whole(self) -> bool:
        """Whether all rows of this server are protected."""
        return self._whole and not self._lost and not self._over

    @property
    def is_over(self) -> bool:
        """Whether another group, or none, has come after this one."""
        return self._over

    @property
    def has_met(self) -> bool:
        """Whether all others have answered: what is pushed is sent to them."""
        return self._met

    @property
    def is_filling(self) -> bool:
        """Whether rows that were there before may still be sent."""
        return not self._lost and not self._over

    @property
    def holders(self) -> tuple[int, ...]:
        """The members that items are sent to: all others but lost ones."""
        return tuple(member for member in self._others if member not in self._lost)

    @property
    def lost(self) -> frozenset[int]:
        """The members that are taken for lost."""
        return self._lost

    @property
    def put_count(self) -> int:
        """The number of the last item."""
        return self._put

    @property
    def has_withdrawn(self) -> bool:
        """Whether this member has withdrawn its rows: it sends nothing more, as the others take nothing more of it."""
        return self._withdrew

    def end(self) -> None:
        """Another group, or none, comes after this one; nothing waits for it."""
        self._over = True

    # What this member sends

    def put(self) -> int:
        """Numbers the next item."""
        self._put += 1
        return self._put

    def yet_to_meet(self, acknowledged: Mapping[int, int]) -> tuple[int, ...]:
        """The holders that have not answered the first item."""
        return tuple(member for member in self.holders if not acknowledged[member])

    def meet(self) -> None:
        """All others have answered: the next item has the batches in the rows so far, and pushes follow it."""
        self._met = True

    def filled(self) -> None:
        """All rows that were there before are with the holders."""
        self._whole = True

    def stored(self, acknowledged: Mapping[int, int]) -> int:
        """The last item that all holders have, by what each has acknowledged."""
        return min((acknowledged[member] for member in self.holders), default=self._put)

    def waits_for(self, number: int, acknowledged: Mapping[int, int]) -> tuple[int, ...]:
        """The holders that have yet to store the items up to this one before a push is answered.

        None while the members have yet to meet, and once the group is over.
        """
        return (
            ()
            if self._over or not self._met
            else tuple(member for member in self.holders if acknowledged[member] < number)
        )

    def withdrew(self) -> None:
        """Nothing of this member's rows is left with the holders, who know it."""
        self._withdrew = True

    # What others send. All of them raise SourceOverError once nothing is taken any more.

    def begin(self, source: int, batches: AppliedBatches) -> None:
        """As `Holding.begin`."""
        self._taking()
        self.holding.begin(source, batches)

    def take(self, source: int, stored: int, batch: Batch | None, deltas: _Deltas) -> None:
        """As `Holding.take`."""
        self._taking()
        self.holding.take(source, stored, batch, deltas)

    def take_withdrawal(self, source: int, stored: int, deltas: _Deltas) -> None:
        """As `take`, of rows that the member takes out of the parity: from now on it cannot be rebuilt itself."""
        self.take(source, stored, None, deltas)
        self._withdrawing.add(source)

    def withdrawn(self, source: int, received: Mapping[int, int]) -> None:
        """A member has withdrawn its rows; it takes these members for lost, and has so many items of each."""
        self._taking()
        self.holding.withdraw(source)
        self._marks[source] = dict(received)

    def told(self, source: int) -> None:
        """A member has sent all that others lack to decode the rows of lost members."""
        self._taking()
        self._told.add(source)

    def _taking(self) -> None:
        if self._over:
            raise SourceOverError("the group is over")

    # The loss of members

    def lose(self, lost: frozenset[int]) -> dict[int, int]:
        """Takes members for lost, once and for all; returns what `withdrawn` is to say of them to the others.

        Raises NotHeldError where their rows cannot be rebuilt from this member's parity.
        """
        if self._over or not self._whole or self._lost not in (frozenset(), lost):
            raise NotHeldError("this server's rows are not protected")
        if len(lost) > self._parity:
            raise NotHeldError(f"{len(lost)} servers are lost, and parity covers {self._parity}")
        if gone := lost & self._withdrawing:
            raise NotHeldError(f"{len(gone)} of the lost servers had begun to take their rows out of the parity")
        self._lost = lost
        self._received = {member: self.holding.lose(member) for member in sorted(lost)}
        return self._received

    def agreed(self) -> dict[int, AppliedBatches] | None:
        """The batches in the rows of each lost member, once these rows alone are left in the parity; None before that.

        All others have said how many items came from each, and those that some lack are dropped. Raises NotHeldError.
        """
        self.require()
        if not self._lost or not set(self.holders) <= self._marks.keys():
            return None
        marks = [self._marks[member] for member in self.holders]
        if any(named.keys() != self._lost for named in marks):
            raise NotHeldError("the servers do not agree on which ones are lost")
        for lost in self._lost:
            self.holding.agree(lost, min([self._received[lost], *(received[lost] for received in marks)]))
        return {lost: self.holding.applied(lost) for lost in sorted(self._lost)}

    def has_all(self) -> bool:
        """Whether what others have is here that this member lacks to decode rows. Raises NotHeldError."""
        self.require()
        return len(self._lost) < 2 or set(self.holders) <= self._told

    def require(self) -> None:
        """Raises NotHeldError once the group is over."""
        if self._over:
            raise NotHeldError("the group is over")


def is_parity_stream(stream: int) -> bool:
    """Whether a row stream carries deltas for parity, and not rows of a move."""
    return bool(stream & _PARITY_STREAM)


def parity_stream(version: int, source: int) -> int:
    """The number of the row stream of a server's deltas under a routing table of this version: 64 bits."""
    return _PARITY_STREAM | version * _SERVERS | source


def source_of(stream: int, generation: int, newest: tuple[int, int], members: tuple[int, ...]) -> int | None:
    """The member that a parity stream of a generation is of, to a server whose `newest` group has these `members`.

    None: this server has yet to begin the group. Raises StreamLostError for a stream of an earlier one.
    """
    version, source = (stream & ~_PARITY_STREAM) // _SERVERS, stream % _SERVERS
    if newest < (generation, version):
        return None
    if newest > (generation, version) or source not in members:
        raise StreamLostError(f"server {source} is not of the group of version {newest[1]}")
    return members.index(source)
