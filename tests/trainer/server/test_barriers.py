"""The barriers of one parameter server under random interleavings of events; `scenarios/` tells of single cases."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.trainer.server.cores import assign, header, serving, switched

from emberscale_api.wire import Header, Status
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.core import LaterError, ServerCore, Wait
from emberscale_trainer.server.staleness import StalenessBound
from examples import examples


def test_a_checkpoint_is_begun_in_one_barrier_only() -> None:
    """Two masters from one ledger use the same number: the second could overwrite files of a complete checkpoint."""
    core = serving()
    core.hold(1, 1, 5, 10.0, 0.0, 7)
    assert core.next_checkpoint == 8
    core.hold(1, 1, 5, 10.0, 1.0, 7)  # the same call again
    core.resume(1, 5)
    for checkpoint in (7, 6):
        with pytest.raises(LaterError, match=f"checkpoint 7 was begun here, and {checkpoint} is not later"):
            core.hold(1, 1, 6, 10.0, 2.0, checkpoint)
    core.hold(1, 1, 6, 10.0, 2.0)  # a move's barrier begins no checkpoint
    core.resume(1, 6)
    core.hold(1, 1, 7, 10.0, 3.0, 8)
    assert core.next_checkpoint == 9


class Interleavings(RuleBasedStateMachine):
    """One server under pushes, barriers, lapses, dead leases, lost sessions and roll-backs, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.generation = 0
        self.version = 0
        self.core = ServerCore()
        self.applied: dict[int, int] = {}
        self.barrier = 0
        self.until: float | None = None
        self.allowed: set[int] = set()
        self.reported: set[int] | None = None
        self.live: set[int] = set()
        self.next_token = 1

    @initialize(bound=st.none() | st.integers(0, 3))
    def start(self, bound: int | None) -> None:
        self.roll_back(bound)

    @rule(bound=st.none() | st.integers(0, 3))
    def roll_back(self, bound: int | None) -> None:
        self.generation += 1
        self.version += 1
        assign(self.core, self.generation, self.version, None if bound is None else StalenessBound(bound))
        self.applied, self.live, self.next_token = {}, set(), 1
        self.let_go()

    def let_go(self) -> None:
        self.until, self.allowed, self.reported = None, set(), None

    @property
    def held(self) -> bool:
        return self.until is not None and self.now < self.until

    def header(self, batch: int, token: int, generations: int = 0, versions: int = 0) -> Header:
        return header(batch, token, batch // 4, self.generation - generations, self.version - versions)

    @rule(
        batch=st.integers(0, 11),
        token=st.integers(1, 8),
        session=st.integers(0, 2),
        generations=st.sampled_from([0, 0, 0, 1]),
        versions=st.sampled_from([0, 0, 0, 1, -1]),
    )
    def push(self, batch: int, token: int, session: int, generations: int, versions: int) -> None:
        request = self.header(batch, token, generations, versions)
        decision = self.core.push(session, request, self.now, self.now)
        assert isinstance(decision, (Status, Wait))
        if decision is not Status.OK:
            return
        assert (generations, versions) == (0, 0)
        assert token in self.live or token >= self.next_token
        assert not self.held or batch in self.allowed
        self.core.record(session, request, self.now)
        self.applied[batch] = self.applied.get(batch, 0) + 1
        self.core.complete(session, request)

    @rule(batch=st.integers(0, 11), token=st.integers(1, 8), session=st.integers(0, 2))
    def admit(self, batch: int, token: int, session: int) -> None:
        if self.core.admit(session, self.header(batch, token), 0.0) is Status.OK:
            assert token in self.live or token >= self.next_token

    @rule(session=st.integers(0, 2))
    def lose_a_session(self, session: int) -> None:
        self.core.disconnected(session)

    @rule(seconds=st.sampled_from([1.0, 5.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data())
    def leases_end(self, data: st.DataObject) -> None:
        self.next_token = min(8, self.next_token + data.draw(st.integers(0, 2)))
        self.live = {token for token in range(1, self.next_token) if data.draw(st.booleans())}
        self.core.hear_leases(self.generation, self.live, self.next_token)

    @rule()
    def hold(self) -> None:
        self.barrier += 1
        applied = self.core.hold(self.generation, self.version, self.barrier, 10, self.now)
        assert numbers(applied) == set(self.applied)
        self.until, self.allowed, self.reported = self.now + 10, set(), None

    @precondition(lambda self: self.barrier)
    @rule(batches=st.sets(st.integers(0, 11)))
    def settle(self, batches: set[int]) -> None:
        ranges = [(0, batch, batch + 1) for batch in batches]
        if not self.held:
            with pytest.raises(NotHeldError):
                self.core.settle(self.generation, self.barrier, ranges, 10, self.now)
            return
        self.core.settle(self.generation, self.barrier, ranges, 10, self.now)
        self.until, self.allowed, self.reported = self.now + 10, batches - set(self.applied), None

    @precondition(lambda self: self.held)
    @rule()
    def report(self) -> None:
        try:
            applied = self.core.settled(self.generation, self.barrier, self.now)
        except NotHeldError:
            return
        if applied is not None:
            assert self.allowed <= numbers(applied)
            self.reported = numbers(applied)

    @precondition(lambda self: self.barrier)
    @rule(switch=st.booleans())
    def finish(self, switch: bool) -> None:
        try:
            if switch:
                outcome = switched(self.core, self.barrier, self.version + 1, self.generation, self.now)
            else:
                outcome = self.core.snapshot(self.generation, self.barrier, self.now)
        except NotHeldError:
            return
        if outcome.repeated:
            return
        self.version += switch
        assert self.held
        assert numbers(outcome.applied) == set(self.applied)
        if self.reported is not None:
            assert numbers(outcome.applied) == self.reported
        self.let_go()

    @rule(older=st.integers(0, 1))
    def resume(self, older: int) -> None:
        self.core.resume(self.generation, self.barrier - older)
        if not older:
            self.let_go()

    @invariant()
    def each_batch_is_applied_at_most_once(self) -> None:
        assert all(times == 1 for times in self.applied.values())
        if self.generation:
            assert numbers(self.core.applied) == set(self.applied)


def numbers(applied: AppliedBatches) -> set[int]:
    return {number for first, stop in applied.ranges(0) for number in range(first, stop)}


Interleavings.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40)
TestInterleavings = Interleavings.TestCase
