"""Mutations that each break one rule of the cores; the simulation must find all of them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tests.simulation.calls import Request
from tests.simulation.mover import SimulatedMover
from tests.simulation.parameter_server import ParameterServer
from tests.simulation.rounds import Turns
from tests.simulation.storage import Storage, Stored
from tests.simulation.store import Redis
from tests.simulation.worker import Pipeline
from tests.simulation.world import Process, Task

from emberscale_api.routing import RoutingTable
from emberscale_api.wire import Status
from emberscale_jobmaster import barrier as driven
from emberscale_jobmaster import due_checkpoints, moving, progress, rebuilding, scaling, takeover
from emberscale_jobmaster.effects import Effect, HandOverCall, ServerRequest, SettleCall
from emberscale_jobmaster.observations import Observations
from emberscale_jobmaster.operations import Move, MovePhase
from emberscale_jobmaster.ranges import Applied
from emberscale_jobmaster.state import JobState
from emberscale_trainer.parity import Holding
from emberscale_trainer.parity.withdrawals import Withdrawals
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server import core as server_core
from emberscale_trainer.server import staleness
from emberscale_trainer.server.adoption import PartlyApplied
from emberscale_trainer.server.barrier import Barrier
from emberscale_trainer.server.fencing import LeaseFence
from emberscale_trainer.server.group import GroupCore
from emberscale_trainer.server.lag import ParityLag
from emberscale_trainer.server.missing import MissingRows
from emberscale_trainer.server.staleness import StalenessBound, Ticket
from emberscale_trainer.worker import core as worker_core

Patches = Callable[[ExitStack], None]


def _lapsed_barrier_is_accepted(stack: ExitStack) -> None:
    def held_until(self: Barrier, batch: tuple[int, int], now: float) -> float | None:
        held = self._held
        return None if held is None or batch in held.settling or now >= held.until else held.until

    stack.enter_context(patch.object(Barrier, "_current", lambda self, now: self._held))
    stack.enter_context(patch.object(Barrier, "held_until", held_until))
    stack.enter_context(patch.object(Barrier, "applied", lambda self, batch, now: None))


def _nothing_is_settled_nor_compared(stack: ExitStack) -> None:
    stack.enter_context(patch.object(driven.DrivenBarrier, "settling", lambda self, server: {}))
    stack.enter_context(patch.object(driven.DrivenBarrier, "_agreed", lambda self, said: None))
    stack.enter_context(patch.object(driven, "differing", lambda one, other: ""))


def _tickets_are_forgotten_by_worker(stack: ExitStack) -> None:
    begin = Pipeline.__init__

    def numbered(self: Pipeline, worker: Any, table: RoutingTable) -> None:
        begin(self, worker, table)
        self.session = worker.index

    def disconnected(self: server_core.ServerCore, session: int) -> None:
        if self._serving is not None and self._serving.bound is not None:
            self._serving.bound.forget_session(session)

    stack.enter_context(patch.object(Pipeline, "__init__", numbered))
    stack.enter_context(patch.object(server_core.ServerCore, "disconnected", disconnected))
    stack.enter_context(patch.object(ParameterServer, "forgets_sessions", False))


def _dead_lease_may_push(stack: ExitStack) -> None:
    stack.enter_context(patch.object(LeaseFence, "is_dead", lambda self, token: False))


def _push_is_recorded_before_there_is_room(stack: ExitStack) -> None:
    def apply(self: ParameterServer, session: int, asked: Request) -> None:
        self._record(session, asked)
        self._reserve()
        self._step(session, asked)

    stack.enter_context(patch.object(ParameterServer, "apply", apply))


def _roll_back_keeps_the_generation(stack: ExitStack) -> None:
    unowned = progress.unowned
    for module in (progress, takeover):
        stack.enter_context(
            patch.object(module, "unowned", lambda generation, version: unowned(generation - 1, version))
        )


def _other_histories_may_push(stack: ExitStack) -> None:
    push = server_core.ServerCore.push

    def pushed(self: server_core.ServerCore, session: int, header: Any, arrived: float, now: float) -> Any:
        generation, _ = self.known
        decision = push(self, session, header, arrived, now)
        if decision is Status.REFRESH and self.serving and (header.epoch, header.batch) not in self.applied:
            return Status.OK if header.generation < generation else decision
        return decision

    stack.enter_context(patch.object(server_core.ServerCore, "push", pushed))


def _unreachable_file_is_damaged(stack: ExitStack) -> None:
    read = Storage.read

    def read_once(self: Storage, process: Process, path: str) -> Task[Stored]:
        try:
            return (yield from read(self, process, path))
        except OSError as error:
            raise FileNotFoundError(path) from error

    stack.enter_context(patch.object(Storage, "read", read_once))


def _old_master_may_write(stack: ExitStack) -> None:
    def save(self: Redis, term: int, holder: str, state: JobState) -> Task[None]:
        yield from ()
        kept = self._disk.newest
        self._disk.write(type(kept)(kept.term, kept.holder, state))
        self._masters.wrote(holder)

    stack.enter_context(patch.object(Redis, "save", save))


def _server_0_alone_commits(stack: ExitStack) -> None:
    ask_all = worker_core._ask_all

    def first_only(exchange: Any) -> Any:
        exchange, effects = ask_all(exchange)
        if exchange.purpose is worker_core.Purpose.PUSH:
            exchange = exchange._replace(queue=())
        return exchange, effects

    stack.enter_context(patch.object(worker_core, "_ask_all", first_only))


def _pushes_under_way_are_not_bounded(stack: ExitStack) -> None:
    may_push = StalenessBound.may_push

    def without(self: StalenessBound, ticket: Ticket) -> bool:
        under_way, self._under_way = self._under_way, {}
        try:
            return may_push(self, ticket)
        finally:
            self._under_way = under_way

    stack.enter_context(patch.object(StalenessBound, "may_push", without))


def _successor_answers_for_its_predecessor(stack: ExitStack) -> None:
    stack.enter_context(patch.object(ParameterServer, "is_meant", lambda self, incarnation: True))


def _numbers_come_again(stack: ExitStack) -> None:
    """Each master skips only a fixed gap beyond the numbers that it finds, whatever was given beyond it and lost."""
    stack.enter_context(patch.object(takeover, "with_fresh_numbers", lambda state, wall: state))
    stack.enter_context(patch.object(takeover, "surpass_numbers", lambda state, *numbers: state))


def _last_changes_stay_behind(stack: ExitStack) -> None:
    request = moving._request

    def held(state: JobState, operation: Move, whom: int) -> ServerRequest:
        asked = request(state, operation, whom)
        if not isinstance(asked, HandOverCall):
            return asked
        return SettleCall(asked.generation, asked.barrier, asked.hold_seconds, {}, asked.wait_seconds)

    stack.enter_context(patch.object(moving, "_request", held))


def _barrier_over_another_table_is_held(stack: ExitStack) -> None:
    hold = server_core.ServerCore.hold

    def held(
        self: server_core.ServerCore, generation: int, version: int, number: int, seconds: float, now: float, taken: int
    ) -> AppliedBatches:
        return hold(self, generation, self.known[1], number, seconds, now, taken)

    stack.enter_context(patch.object(server_core.ServerCore, "hold", held))
    _new_masters_do_not_listen_first(stack)
    # such a master seldom has anything to save that the newest checkpoint does not hold
    stack.enter_context(patch.object(due_checkpoints, "_has_all", lambda state, spec: False))


def _new_masters_do_not_listen_first(stack: ExitStack) -> None:
    """A new master normally hears first what servers serve, so it seldom asks what they would refuse."""
    stack.enter_context(patch.object(Observations, "has_heard_servers", lambda self, members: True))


def _switch_lets_go_of_its_barrier(stack: ExitStack) -> None:
    clean_up = moving.clean_up

    def resumed(before: Move, after: JobState) -> tuple[Effect, ...]:
        return clean_up(replace(before, phase=MovePhase.BARRIER), after)

    stack.enter_context(patch.object(moving, "clean_up", resumed))


def _edit_is_waited_for_while_rows_are_lost(stack: ExitStack) -> None:
    follow = scaling.follow_manifest

    def resumed(state: JobState, *given: Any) -> JobState:
        spec, before, now, wall, waits, *_ = given
        return follow(state, spec, before, now, wall, waits, True)

    stack.enter_context(patch.object(scaling, "follow_manifest", resumed))


def _tables_of_one_version_are_one(stack: ExitStack) -> None:
    assign = server_core.ServerCore.assign

    def assigned(self: server_core.ServerCore, wanted: server_core.Assignment) -> server_core.Assigning:
        return assign(self, replace(wanted, servers=()))

    stack.enter_context(patch.object(server_core.ServerCore, "assign", assigned))


def _checkpoints_come_again(stack: ExitStack) -> None:
    hold = server_core.ServerCore.hold

    def held(self: server_core.ServerCore, *given: Any) -> AppliedBatches:
        return hold(self, *given[:5])

    stack.enter_context(patch.object(server_core.ServerCore, "hold", held))
    _new_masters_do_not_listen_first(stack)


def _pulls_that_nobody_knows_count(stack: ExitStack) -> None:
    stack.enter_context(patch.object(StalenessBound, "take_over", lambda self, pulls: None))
    stack.enter_context(patch.object(StalenessBound, "is_outstanding", lambda self, ticket: True))


def _repeats_need_no_pull(stack: ExitStack) -> None:
    push = server_core.ServerCore.push

    def pushed(self: server_core.ServerCore, session: int, header: Any, *given: Any) -> Any:
        serving = self._serving
        if serving is None or any((header.epoch, number) not in serving.applied for number in header.numbers):
            return push(self, session, header, *given)
        with patch.object(serving, "knows_pulls", True):
            return push(self, session, header, *given)

    stack.enter_context(patch.object(server_core.ServerCore, "push", pushed))


def _servers_may_differ_about_rebuilt_rows(stack: ExitStack) -> None:
    """Removes a check by which the master itself would notice the difference and roll back."""

    def first_said(move: Move) -> Mapping[int, Applied] | None:
        said = [report.rebuilt for index, report in move.copied.items() if index not in move.lost]
        return {server: applied for one in reversed(said) for server, applied in one.items()}

    stack.enter_context(patch.object(rebuilding, "rebuilt", first_said))


def _holders_do_not_agree_on_the_least(stack: ExitStack) -> None:
    agree = Holding.agree

    def agreed(self: Holding[Any], source: int, number: int) -> None:
        agree(self, source, self.received(source))

    stack.enter_context(patch.object(Holding, "agree", agreed))
    _servers_may_differ_about_rebuilt_rows(stack)


def _items_are_applied_as_they_come(stack: ExitStack) -> None:
    take, agree = Holding.take, Holding.agree

    def taken(self: Holding[Any], source: int, stored: int, batch: Any, deltas: Any) -> None:
        take(self, source, stored, batch, deltas)
        self._apply(source, self.received(source))

    def agreed(self: Holding[Any], source: int, number: int) -> None:
        agree(self, source, self.received(source))

    stack.enter_context(patch.object(Holding, "take", taken))
    stack.enter_context(patch.object(Holding, "agree", agreed))
    _servers_may_differ_about_rebuilt_rows(stack)


def _rows_are_sent_before_others_have_withdrawn(stack: ExitStack) -> None:
    def agreed(self: GroupCore[Any]) -> dict[int, AppliedBatches]:
        for lost, received in self._received.items():
            self.holding.agree(lost, received)
        return {lost: self.holding.applied(lost) for lost in self._received}

    stack.enter_context(patch.object(GroupCore, "agreed", agreed))
    _servers_may_differ_about_rebuilt_rows(stack)


def _holders_do_not_pause(stack: ExitStack) -> None:
    def pause(self: Holding[Any], source: int) -> None:
        one = self._of(source)
        self._apply(source, one.received)
        one.kept.append(((), None))
        one.received += 1

    stack.enter_context(patch.object(Holding, "pause", pause))


def _requests_do_not_wait_for_missing_rows(stack: ExitStack) -> None:
    stack.enter_context(patch.object(ParameterServer, "_once_there", lambda self, asked, decide: decide))


def _barriers_are_held_while_rows_are_missing(stack: ExitStack) -> None:
    """Masters normally ask for none then."""

    def miss(self: ParameterServer, missing: MissingRows | None) -> None:
        self.missing = missing
        self.notify()

    stack.enter_context(patch.object(ParameterServer, "miss", miss))
    stack.enter_context(patch.object(JobState, "misses_rows", False))


def _new_group_is_formed_at_once(stack: ExitStack) -> None:
    stack.enter_context(patch.object(SimulatedMover, "_may_protect", lambda self, table: True))


def _withdrawals_of_some_are_enough(stack: ExitStack) -> None:
    def look(self: Withdrawals, table: int, stripe: int, places: Any) -> None:
        for out in self._out[table, stripe].values():
            if out[places].any():
                self.decodable.add(table, stripe, places[out[places]])
                return

    stack.enter_context(patch.object(Withdrawals, "_look", look))


def _halves_are_not_waited_for(stack: ExitStack) -> None:
    stack.enter_context(patch.object(GroupCore, "has_halves", lambda self: True))


def _pushes_are_answered_before_their_deltas_are_stored(stack: ExitStack) -> None:
    stack.enter_context(patch.object(GroupCore, "waits_for", lambda self, number, acknowledged: ()))


def _lag_is_not_bounded(stack: ExitStack) -> None:
    stack.enter_context(patch.object(ParityLag, "must_store", lambda self, last: 0 if self.is_async else last))


def _what_was_answered_stays_leased(stack: ExitStack) -> None:
    forgetting = rebuilding._forgetting

    def keeping_leases(state: JobState, spec: Any, move: Move) -> tuple[JobState, Move]:
        after, move = forgetting(state, spec, move)
        return replace(after, ledger=state.ledger), move

    stack.enter_context(patch.object(rebuilding, "_forgetting", keeping_leases))


def _what_is_forgotten_is_not_recorded(stack: ExitStack) -> None:
    forgetting = rebuilding._forgetting

    def silent(state: JobState, spec: Any, move: Move) -> tuple[JobState, Move]:
        after, move = forgetting(state, spec, move)
        return after, replace(move, forgotten=())

    stack.enter_context(patch.object(rebuilding, "_forgetting", silent))


def _gathered_pushes_are_sent_without_their_names(stack: ExitStack) -> None:
    send = ParityLag.send
    stack.enter_context(patch.object(ParityLag, "send", lambda self, number, size: send(self, number, size)[-1:]))


def _torn_batch_is_applied_to_all_rows(stack: ExitStack) -> None:
    stack.enter_context(patch.object(server_core.ServerCore, "lacking", lambda self, header: None))


def _adopted_rows_have_what_their_server_has(stack: ExitStack) -> None:
    stack.enter_context(patch.object(server_core, "combined", lambda records: (records[0][1], PartlyApplied())))


def _rows_with_different_batches_are_held(stack: ExitStack) -> None:
    hold = server_core.ServerCore.hold

    def held(self: server_core.ServerCore, *given: Any) -> AppliedBatches:
        serving = self._require()
        partly, serving.partly = serving.partly, PartlyApplied()
        try:
            return hold(self, *given)
        finally:
            serving.partly = partly

    stack.enter_context(patch.object(server_core.ServerCore, "hold", held))


def _part_of_a_round_is_no_obstacle(stack: ExitStack) -> None:
    push = server_core.ServerCore.push

    def pushed(self: server_core.ServerCore, *given: Any) -> Any:
        decision = push(self, *given)
        return Status.OK if decision is Status.PARTIAL else decision

    def record(self: server_core.ServerCore, session: int, header: Any, now: float) -> None:
        for number in header.numbers:
            self.applied.record(header.epoch, number)

    stack.enter_context(patch.object(server_core.ServerCore, "push", pushed))
    stack.enter_context(patch.object(server_core.ServerCore, "record", record))


def _pulls_overlap_pushes_of_rounds(stack: ExitStack) -> None:
    def take(self: Turns, may_begin: Callable[[], bool] = lambda: True) -> Task[None]:
        yield from self._wait(may_begin)

    stack.enter_context(patch.object(Turns, "take", take))


def _pull_ahead_waits_for_the_bound(stack: ExitStack) -> None:
    admit = server_core.ServerCore.admit

    def admitted(self: server_core.ServerCore, session: int, header: Any, now: float) -> Any:
        decision = admit(self, session, header, now)
        return server_core.Wait(None) if decision is Status.LATER else decision

    stack.enter_context(patch.object(server_core.ServerCore, "admit", admitted))


def _rounds_count_as_one_batch(stack: ExitStack) -> None:
    batches, aged = staleness._batches, staleness._aged

    def one_each(pulls: Any, ticket: Ticket) -> int:
        single = [replace(pull, ticket=pull.ticket._replace(batches=1)) for pull in pulls]
        return batches(single, ticket)

    stack.enter_context(patch.object(staleness, "_batches", one_each))
    stack.enter_context(patch.object(staleness, "_aged", lambda pull, ticket: aged(pull, ticket._replace(batches=1))))


MUTATIONS: dict[str, Patches] = {
    "a lapsed barrier is accepted": _lapsed_barrier_is_accepted,
    "nothing is settled nor compared": _nothing_is_settled_nor_compared,
    "tickets are forgotten by worker": _tickets_are_forgotten_by_worker,
    "a dead lease may push": _dead_lease_may_push,
    "a push is recorded before there is room": _push_is_recorded_before_there_is_room,
    "a roll-back keeps the generation": _roll_back_keeps_the_generation,
    "other histories may push": _other_histories_may_push,
    "an unreachable file is damaged": _unreachable_file_is_damaged,
    "an old master may write": _old_master_may_write,
    "server 0 alone commits": _server_0_alone_commits,
    "pushes under way are not bounded": _pushes_under_way_are_not_bounded,
    "numbers come again": _numbers_come_again,
    "the last changes of a move stay behind": _last_changes_stay_behind,
    "a barrier over another table is held": _barrier_over_another_table_is_held,
    "a switch lets go of its barrier": _switch_lets_go_of_its_barrier,
    "an edit is waited for while rows are lost": _edit_is_waited_for_while_rows_are_lost,
    "checkpoints come again": _checkpoints_come_again,
    "tables of one version are one": _tables_of_one_version_are_one,
    "pulls that nobody knows count": _pulls_that_nobody_knows_count,
    "a repeat needs no pull": _repeats_need_no_pull,
    "a successor answers for its predecessor": _successor_answers_for_its_predecessor,
    "holders do not agree on the least": _holders_do_not_agree_on_the_least,
    "items are applied as they come": _items_are_applied_as_they_come,
    "rows are sent before others have withdrawn": _rows_are_sent_before_others_have_withdrawn,
    "a holder does not pause": _holders_do_not_pause,
    "a request does not wait for missing rows": _requests_do_not_wait_for_missing_rows,
    "a barrier is held while rows are missing": _barriers_are_held_while_rows_are_missing,
    "the new group is formed at once": _new_group_is_formed_at_once,
    "withdrawals of some are enough": _withdrawals_of_some_are_enough,
    "halves are not waited for": _halves_are_not_waited_for,
    "a part of a round is no obstacle": _part_of_a_round_is_no_obstacle,
    "pulls overlap pushes of rounds": _pulls_overlap_pushes_of_rounds,
    "a pull ahead waits for the bound": _pull_ahead_waits_for_the_bound,
    "rounds count as one batch": _rounds_count_as_one_batch,
    "the lag is not bounded": _lag_is_not_bounded,
    "what was answered stays leased": _what_was_answered_stays_leased,
    "what is forgotten is not recorded": _what_is_forgotten_is_not_recorded,
    "gathered pushes are sent without their names": _gathered_pushes_are_sent_without_their_names,
    "pushes are answered before deltas are stored": _pushes_are_answered_before_their_deltas_are_stored,
    "a torn batch is applied to all rows": _torn_batch_is_applied_to_all_rows,
    "adopted rows have what their server has": _adopted_rows_have_what_their_server_has,
    "rows with different batches are held": _rows_with_different_batches_are_held,
}


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Breaks one rule of the cores while the body runs."""
    with ExitStack() as stack:
        MUTATIONS[name](stack)
        yield
