"""The members of a job: one slot per role and index, held by one incarnation at a time.

An incarnation that was superseded, or whose end was reported, is not accepted again. A silent member may return,
without its leases.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from emberscale_api.frozen import replace
from emberscale_api.job.roles import MemberId, Role, slot_name
from emberscale_api.routing import PsAddress

REMEMBERED = 64
"""How many incarnations a slot remembers, the newest, since every save of the job's state has them all.

Refused calls and repeated reports come from incarnations that ended lately. An older one would be told to register, and
would take the slot; but the operator ends the process of a slot before it starts so many successors.
"""


class UnknownMemberError(Exception):
    """The member never registered; it must register first."""

    def __init__(self, member: MemberId) -> None:
        super().__init__(f"{member.slot} with incarnation {member.incarnation!r} is not registered: register first")


class SupersededMemberError(Exception):
    """The member was replaced, or its end was reported; it must exit."""

    def __init__(self, member: MemberId) -> None:
        super().__init__(f"{member.slot} with incarnation {member.incarnation!r} was superseded and must exit")


@dataclass(frozen=True)
class Process:
    """A registered process. `alive` is False while it is silent for too long.

    `most_parity`: the largest parity that it can keep when told to; 0 for a version that ignores the master's choice,
    from before `Auto` could choose parity. `knows_async_parity`: whether it can hold deltas of several batches that
    come as one, and answer pushes before others hold their deltas. `adopts_rows`: whether it can take over the rows of
    a lost server while it has rows of its own. `rebuilds_on_demand`: whether it can serve rebuilt rows that have yet to
    arrive, and rebuild those first that are wanted.
    """

    incarnation: str
    data_address: str
    control_address: str
    metrics_address: str
    alive: bool = True
    most_parity: int = 0
    knows_async_parity: bool = False
    adopts_rows: bool = False
    rebuilds_on_demand: bool = False


class DrainPhase(StrEnum):
    """The phase of a drain."""

    LEAVES = "Leaves"
    """The rows of the server move away."""
    DRAINED = "Drained"
    """The server owns nothing, and may go."""
    REPLACED = "Replaced"
    """A successor has joined, and gets its share."""


@dataclass(frozen=True)
class Drain:
    """A parameter server that leaves without loss.

    * `incarnation`: the process that leaves. `why`: the reason, for people.
    * `began_at`: on the job's clock, in seconds.
    * `replaced`: whether the master has the process replaced once it owns nothing.
    """

    incarnation: str
    why: str
    began_at: float
    phase: DrainPhase
    replaced: bool = False


@dataclass(frozen=True)
class Slot:
    """One role and index: the process that holds it, if any, and incarnations that may no longer hold it.

    * `past`: the newest incarnations that were superseded or expelled, or whose end was reported.
    * `exits`: the newest incarnations that the operator reported as ended; a repeated report counts once.
    * `given_up`: the incarnation to replace because it is silent or stuck; empty if there is none.
    """

    role: Role
    index: int
    process: Process | None = None
    registrations: int = 0
    past: tuple[str, ...] = ()
    exits: tuple[str, ...] = ()
    given_up: str = ""

    @property
    def live_process(self) -> Process | None:
        """The process that holds it if it is alive."""
        return self.process if self.process is not None and self.process.alive else None


@dataclass(frozen=True)
class Membership:
    """Immutable; every method that changes something returns a new membership."""

    slots: Mapping[str, Slot] = field(default_factory=dict)

    def slot(self, role: Role, index: int) -> Slot:
        """The slot, empty if nobody ever registered there."""
        return self.slots.get(slot_name(role, index)) or Slot(role, index)

    def process(self, role: Role, index: int) -> Process | None:
        """The process in a slot if it is alive."""
        slot = self.slots.get(slot_name(role, index))
        return None if slot is None else slot.live_process

    def live(self, *roles: Role) -> dict[str, MemberId]:
        """Returns the live members of these roles, by slot; of all roles if none is given."""
        return {
            name: MemberId(slot.role, slot.index, process.incarnation)
            for name, slot in self.slots.items()
            if (not roles or slot.role in roles) and (process := slot.live_process) is not None
        }

    def live_slots(self, role: Role) -> list[str]:
        """Returns the slots of the live members of a role."""
        return [name for name, slot in self.slots.items() if slot.role is role and slot.live_process is not None]

    def server(self, index: int) -> PsAddress | None:
        """The parameter server of this index if it is alive, as a routing table names it."""
        process = self.process(Role.PS, index)
        if process is None:
            return None
        return _address(index, process)

    def has(self, server: PsAddress) -> bool:
        """Whether a server of a routing table is alive and no other process has taken its slot."""
        present = self.process(Role.PS, server.index)
        return present is not None and present.incarnation == server.incarnation

    def keeps(self, server: PsAddress) -> bool:
        """Whether a server of a routing table still has its slot, alive or silent: it may speak again."""
        process = self.slot(Role.PS, server.index).process
        return process is not None and process.incarnation == server.incarnation

    def servers(self) -> tuple[PsAddress, ...]:
        """The parameter servers that have a slot, alive or silent."""
        found = ((slot.index, slot.process) for slot in self.slots.values() if slot.role is Role.PS)
        return tuple(_address(index, process) for index, process in found if process is not None)

    def register(self, role: Role, index: int, process: Process) -> "Membership":
        """Puts a process in its slot and replaces its predecessor. Registering twice has no further effect.

        Raises SupersededMemberError.
        """
        slot = self.slot(role, index)
        if process.incarnation in slot.past:
            raise SupersededMemberError(MemberId(role, index, process.incarnation))
        before = slot.process
        if before is not None and before.incarnation == process.incarnation:
            return self._with(replace(slot, process=process, given_up=""))
        slot = replace(slot, given_up="")
        past = slot.past if before is None else _with_newest(slot.past, before.incarnation)
        return self._with(replace(slot, process=process, past=past, registrations=slot.registrations + 1))

    def check(self, member: MemberId) -> Process:
        """The member's process. Raises UnknownMemberError or SupersededMemberError."""
        slot = self.slot(member.role, member.index)
        if slot.process is not None and slot.process.incarnation == member.incarnation:
            return slot.process
        if member.incarnation in slot.past:
            raise SupersededMemberError(member)
        raise UnknownMemberError(member)

    def spoke(self, member: MemberId) -> "Membership":
        """Notes that a registered member speaks. Raises UnknownMemberError or SupersededMemberError."""
        process, slot = self.check(member), self.slot(member.role, member.index)
        if process.alive and not slot.given_up:
            return self
        return self._with(replace(slot, process=replace(process, alive=True), given_up=""))

    def silent(self, member: MemberId) -> "Membership":
        """Gives up a silent member; the operator replaces it, unless it speaks again first."""
        process, slot = self.check(member), self.slot(member.role, member.index)
        return self._with(replace(slot, process=replace(process, alive=False), given_up=member.incarnation))

    def expelled(self, member: MemberId) -> "Membership":
        """Expels a member that speaks but makes no progress: it is refused and replaced from now on."""
        self.check(member)
        slot = self.slot(member.role, member.index)
        past = _with_newest(slot.past, member.incarnation)
        return self._with(replace(slot, process=None, past=past, given_up=member.incarnation))

    def given_up(self) -> tuple[MemberId, ...]:
        """The incarnations to replace."""
        return tuple(MemberId(slot.role, slot.index, slot.given_up) for slot in self.slots.values() if slot.given_up)

    def silenced(self) -> "Membership":
        """Marks every member as not alive until it speaks."""
        return Membership(
            {
                name: replace(slot, process=replace(slot.process, alive=False) if slot.process else None, given_up="")
                for name, slot in self.slots.items()
            }
        )

    def exited(self, member: MemberId) -> "Membership":
        """Notes the end of a process, registered or not: its incarnation is refused from now on."""
        slot = self.slot(member.role, member.index)
        if member.incarnation in slot.exits:
            return self
        current = slot.process
        if current is not None and current.incarnation == member.incarnation:
            current = None
        past = _with_newest(slot.past, member.incarnation)
        given_up = "" if slot.given_up == member.incarnation else slot.given_up
        exits = _with_newest(slot.exits, member.incarnation)
        return self._with(replace(slot, process=current, past=past, exits=exits, given_up=given_up))

    def _with(self, slot: Slot) -> "Membership":
        return Membership({**self.slots, slot_name(slot.role, slot.index): slot})


def _address(index: int, server: Process) -> PsAddress:
    return PsAddress(index, server.incarnation, server.data_address, server.control_address)


def _with_newest(known: tuple[str, ...], incarnation: str) -> tuple[str, ...]:
    """Returns the incarnations with another one, without those that are too old to be remembered."""
    return known if incarnation in known else (*known, incarnation)[-REMEMBERED:]
