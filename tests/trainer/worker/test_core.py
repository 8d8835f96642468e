"""The exchange of one batch with several servers, answer by answer."""

import pytest

from emberscale_api.wire import Kind, Status
from emberscale_trainer.worker.core import (
    Answered,
    Effect,
    End,
    Ending,
    Event,
    Exchange,
    HistoryChanged,
    Lost,
    Planned,
    Purpose,
    Receive,
    Replan,
    Send,
    begin,
    conversation,
    step,
)

PLAN = Planned(version=4, servers=(0, 1, 2))


def run(purpose: Purpose, *events: Event, plan: Planned = PLAN) -> tuple[Exchange, list[Effect]]:
    """Runs an exchange; returns the effects of the last event, or of the beginning without events."""
    exchange, effects = begin(purpose, plan)
    for event in events:
        exchange, effects = step(exchange, event)
    return exchange, list(effects)


def answers(status: Status, *servers: int) -> list[Event]:
    return [Answered(server, status) for server in servers]


def to(kind: Kind, *servers: int) -> list[Effect]:
    return [Send(server, kind) for server in servers]


def test_a_pull_for_training_goes_to_server_0_first_and_one_for_evaluation_to_all_at_once() -> None:
    assert run(Purpose.TRAIN)[1] == to(Kind.PULL, 0)
    assert run(Purpose.TRAIN, *answers(Status.OK, 0))[1] == to(Kind.PULL, 1, 2)
    assert run(Purpose.TRAIN, *answers(Status.OK, 0, 2, 1))[1] == [End(Ending.DONE)]
    assert run(Purpose.EVALUATE)[1] == to(Kind.PULL, 0, 1, 2)
    assert run(Purpose.EVALUATE, *answers(Status.OK, 2, 0))[1] == []
    assert run(Purpose.EVALUATE, *answers(Status.OK, 2, 0, 1))[1] == [End(Ending.DONE)]


def test_a_push_goes_to_server_0_then_to_the_others_and_is_committed_when_all_have_it() -> None:
    assert run(Purpose.PUSH)[1] == to(Kind.PUSH, 0)
    assert run(Purpose.PUSH, *answers(Status.OK, 0))[1] == to(Kind.PUSH, 1, 2)
    assert run(Purpose.PUSH, *answers(Status.OK, 0, 1))[1] == []
    done = [*to(Kind.COMPLETE, 0), End(Ending.DONE)]
    assert run(Purpose.PUSH, *answers(Status.OK, 0, 1, 2))[1] == done
    assert run(Purpose.PUSH, *answers(Status.REPEATED, 0, 1, 2))[1] == done


def test_one_server_alone_is_enough() -> None:
    only = Planned(1, (0,))
    assert run(Purpose.PUSH, *answers(Status.OK, 0), plan=only)[1] == [*to(Kind.COMPLETE, 0), End(Ending.DONE)]


def test_a_push_that_moved_is_planned_anew_once_all_have_answered_and_asked_of_all() -> None:
    moved = [*answers(Status.OK, 0), *answers(Status.MOVED, 2)]
    assert run(Purpose.PUSH, *moved)[1] == []
    assert run(Purpose.PUSH, *moved, *answers(Status.OK, 1))[1] == [Replan(4)]
    anew = Planned(version=6, servers=(0, 1))
    assert run(Purpose.PUSH, *moved, *answers(Status.OK, 1), anew)[1] == to(Kind.PUSH, 0)
    assert run(Purpose.PUSH, *moved, *answers(Status.OK, 1), anew, *answers(Status.REPEATED, 0))[1] == to(Kind.PUSH, 1)


def test_a_push_that_server_0_moved_is_not_shown_to_others() -> None:
    assert run(Purpose.PUSH, *answers(Status.MOVED, 0))[1] == [Replan(4)]


def test_a_pull_that_moved_is_asked_of_server_0_first_again() -> None:
    moved = [*answers(Status.OK, 0), *answers(Status.MOVED, 1), *answers(Status.OK, 2)]
    assert run(Purpose.TRAIN, *moved)[1] == [Replan(4)]
    assert run(Purpose.TRAIN, *moved, Planned(5, (0, 1, 2, 3)))[1] == to(Kind.PULL, 0)
    assert run(Purpose.TRAIN, *moved, Planned(5, (0, 1, 2, 3)), *answers(Status.OK, 0))[1] == to(Kind.PULL, 1, 2, 3)


def test_another_history_ends_the_exchange() -> None:
    assert run(Purpose.PUSH, *answers(Status.REFRESH, 0))[1] == [End(Ending.STALE)]
    assert run(Purpose.PUSH, *answers(Status.MOVED, 0), HistoryChanged())[1] == [End(Ending.STALE)]


def test_what_ends_an_exchange_does_not_wait_for_the_other_answers() -> None:
    assert run(Purpose.TRAIN, *answers(Status.OK, 0), *answers(Status.FENCED, 1))[1] == [End(Ending.FENCED)]
    assert run(Purpose.TRAIN, Answered(0, Status.REFUSED, "no"))[1] == [End(Ending.REFUSED, "no")]
    assert run(Purpose.PUSH, *answers(Status.OK, 0), Lost("reset"))[1] == [End(Ending.LOST, "reset")]


def test_an_exchange_that_is_over_stays_over() -> None:
    over, _ = run(Purpose.PUSH, Lost("reset"))
    assert step(over, Answered(0, Status.OK)) == (over, ())


def test_a_conversation_sends_nothing_more_once_a_connection_broke() -> None:
    talk = conversation(Purpose.EVALUATE, PLAN)
    assert next(talk) == Send(0, Kind.PULL)
    with pytest.raises(StopIteration) as stopped:
        talk.send(Lost("reset"))
    assert stopped.value.value == End(Ending.LOST, "reset")


def test_a_conversation_waits_for_answers_in_the_order_of_servers() -> None:
    talk = conversation(Purpose.PUSH, Planned(1, (0, 1, 2)))
    assert next(talk) == Send(0, Kind.PUSH)
    assert talk.send(None) == Receive(0, Kind.PUSH)
    assert talk.send(Answered(0, Status.OK)) == Send(1, Kind.PUSH)
    assert [talk.send(None), talk.send(None)] == [Send(2, Kind.PUSH), Receive(1, Kind.PUSH)]


def test_a_push_is_committed_even_if_server_0_cannot_be_told() -> None:
    talk = conversation(Purpose.PUSH, Planned(1, (0,)))
    assert [next(talk), talk.send(None)] == [Send(0, Kind.PUSH), Receive(0, Kind.PUSH)]
    assert talk.send(Answered(0, Status.OK)) == Send(0, Kind.COMPLETE)
    with pytest.raises(StopIteration) as stopped:
        talk.send(Lost("reset"))
    assert stopped.value.value == End(Ending.DONE)
