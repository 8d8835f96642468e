"""The master's side of a barrier: all servers hold pushes, settle the batches that only some have applied, and act.

    HOLD -> SETTLE -> ACT -> done
     any answer that fails, or that differs where all must agree -> void

The barrier succeeds only if every server reports the same applied batches, after settling and again after acting. The
ledger plays no part: its last entries may be lost.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from emberscale_api.frozen import replace
from emberscale_api.routing import PsAddress
from emberscale_jobmaster.ranges import Applied, differing, minus, on_any


class BarrierPhase(StrEnum):
    """Which call all servers are answering."""

    HOLD = "Hold"
    SETTLE = "Settle"
    ACT = "Act"
    DONE = "Done"


class VoidError(Exception):
    """The servers disagree on the applied batches; the text names the difference."""


@dataclass(frozen=True)
class DrivenBarrier:
    """One barrier over all servers of a routing table. Immutable.

    * `held`: what each server had applied when it began to hold.
    * `said`: each server's answer in this phase.
    * `settled`: what all servers have applied, once they agree.
    """

    number: int
    generation: int
    servers: tuple[PsAddress, ...]
    phase: BarrierPhase = BarrierPhase.HOLD
    held: Mapping[int, Applied] = field(default_factory=dict)
    said: Mapping[int, Applied] = field(default_factory=dict)
    settled: Applied = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether every server has acted, and all agree."""
        return self.phase is BarrierPhase.DONE

    def settling(self, server: int) -> Applied:
        """Returns the batches that other servers had applied, and this one had not, when it began to hold."""
        return minus(on_any(self.held.values()), self.held[server])

    def answered(self, server: int, applied: Applied) -> "DrivenBarrier":
        """Returns the barrier after one server's answer, in the next phase once all have answered. Raises VoidError."""
        said = {**self.said, server: applied}
        if len(said) < len(self.servers):
            return replace(self, said=said)
        match self.phase:
            case BarrierPhase.HOLD:
                return replace(self, phase=BarrierPhase.SETTLE, held=said, said={})
            case BarrierPhase.SETTLE:
                self._agreed(said)
                return replace(self, phase=BarrierPhase.ACT, held={}, said={}, settled=on_any(said.values()))
            case BarrierPhase.ACT:
                self._agreed(said)
                if difference := differing(on_any(said.values()), self.settled):
                    raise VoidError(f"pushes were applied after barrier {self.number} had settled: {difference}")
                return replace(self, phase=BarrierPhase.DONE, said={})
            case BarrierPhase.DONE:
                return self

    def _agreed(self, said: Mapping[int, Applied]) -> None:
        first, *others = sorted(said)
        for other in others:
            if difference := differing(said[first], said[other]):
                raise VoidError(
                    f"ps-{first} and ps-{other} differ in what they have applied at barrier {self.number}: {difference}"
                )
