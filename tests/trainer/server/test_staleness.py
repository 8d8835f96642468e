"""The bound on the staleness of gradients."""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from emberscale_trainer.server.staleness import StalenessBound, Ticket


class _Workers(RuleBasedStateMachine):
    """Workers pull, push, complete and die in any order, and wait if the bound does not admit a request.

    `pulled` is the number of pushes that each pull certainly saw, since all servers had applied them. A pull may have
    missed pushes under way on any server but the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bound = 0
        self.subject = StalenessBound(0)
        self.applied = 0
        self.under_way: set[Ticket] = set()
        self.pulled: dict[Ticket, int] = {}
        self.batch = 0
        self.started = False

    @precondition(lambda self: not self.started)
    @rule(bound=st.integers(0, 4), warmup=st.integers(0, 3))
    def start(self, bound: int, warmup: int) -> None:
        self.bound, self.subject, self.started = bound, StalenessBound(bound, warmup), True

    @precondition(lambda self: self.started)
    @rule(worker=st.integers(0, 3))
    def pull(self, worker: int) -> None:
        ticket = Ticket(worker, 0, self.batch)
        if self.subject.may_pull(ticket):
            self.batch += 1
            self.subject.pulled(ticket, token=worker % 2)
            self.pulled[ticket] = self.applied - len(self.under_way)

    @precondition(lambda self: self.pulled)
    @rule(data=st.data())
    def push(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.pulled)))
        if self.subject.may_push(ticket):
            staleness = self.subject.pushed(ticket, token=ticket.session % 2)
            assert staleness == self.applied - self.pulled.pop(ticket)
            assert staleness <= self.bound
            self.applied += 1
            self.under_way.add(ticket)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.under_way)))
        self.subject.completed(ticket)
        self.under_way.remove(ticket)

    @precondition(lambda self: self.pulled)
    @rule(data=st.data())
    def lose_a_session(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.pulled))).session
        self.subject.forget_session(session)
        self.pulled = {ticket: seen for ticket, seen in self.pulled.items() if ticket.session != session}
        self.under_way = {ticket for ticket in self.under_way if ticket.session != session}

    @precondition(lambda self: self.pulled)
    @rule(token=st.integers(0, 1))
    def revoke_leases(self, token: int) -> None:
        self.subject.forget_leases(lambda dead: dead == token)
        self.pulled = {ticket: seen for ticket, seen in self.pulled.items() if ticket.session % 2 != token}
        self.under_way = {ticket for ticket in self.under_way if ticket.session % 2 != token}

    @invariant()
    def someone_can_go_on(self) -> None:
        can_push = any(self.subject.may_push(ticket) for ticket in self.pulled)
        assert self.subject.may_pull(Ticket(9, 0, self.batch)) or can_push or self.under_way

    @invariant()
    def the_oldest_is_held_by_pushes_under_way_alone(self) -> None:
        oldest = min(self.pulled, key=lambda ticket: ticket[2], default=None)
        assert oldest is None or self.under_way or self.subject.may_push(oldest)


TestNoGradientIsStalerThanTheBound = _Workers.TestCase


def test_with_no_staleness_one_batch_is_under_way_at_a_time() -> None:
    bound = StalenessBound(0)
    first, second = Ticket(0, 0, 1), Ticket(0, 0, 2)
    bound.pulled(first, token=1)
    assert not bound.may_pull(second)
    bound.pushed(first, token=1)
    assert not bound.may_pull(second)
    bound.completed(first)
    assert bound.may_pull(second)


def test_a_push_waits_for_one_that_others_could_get_after_it_and_too_late() -> None:
    bound = StalenessBound(1)
    older, younger = Ticket(0, 0, 1), Ticket(1, 0, 2)
    bound.pulled(older, token=1)
    bound.pushed(Ticket(2, 0, 0), token=3)  # the older pull may have missed it
    bound.completed(Ticket(2, 0, 0))
    bound.pulled(younger, token=2)
    bound.pushed(older, token=1)
    assert not bound.may_push(younger)  # on another server it could come first, and make the older one two pushes stale
    bound.completed(older)
    assert bound.may_push(younger)


def test_the_bound_grows_with_the_root_of_the_applied_batches_until_it_is_reached() -> None:
    bound = StalenessBound(2, warmup=10, applied=9)
    assert bound.in_force == 0
    for batch, in_force in ((1, 1), (2, 1)):
        bound.pushed(Ticket(0, 0, batch), token=1)
        assert bound.in_force == in_force
    assert [StalenessBound(2, warmup=10, applied=applied).in_force for applied in (39, 40, 500)] == [1, 2, 2]


def test_a_pull_asked_for_anew_counts_once() -> None:
    bound = StalenessBound(1)
    for _ in range(2):
        bound.pulled(Ticket(0, 0, 1), token=1)
    assert bound.may_pull(Ticket(1, 0, 2))
