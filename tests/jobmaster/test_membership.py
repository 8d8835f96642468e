import pytest
from pydantic import TypeAdapter

from emberscale_api.job.roles import MemberId, Role
from emberscale_jobmaster.membership import Membership, Process, SupersededMemberError, UnknownMemberError


def process(incarnation: str) -> Process:
    return Process(incarnation, "tcp://a:1", "a:2", "a:3")


def member(incarnation: str, index: int = 0) -> MemberId:
    return MemberId(Role.WORKER, index, incarnation)


def test_a_newer_registration_supersedes_the_older_for_ever() -> None:
    members = Membership().register(Role.WORKER, 0, process("a")).register(Role.WORKER, 0, process("b"))

    assert members.check(member("b")).incarnation == "b"
    with pytest.raises(SupersededMemberError, match="worker-0"):
        members.check(member("a"))
    with pytest.raises(SupersededMemberError):
        members.register(Role.WORKER, 0, process("a"))
    members = members.register(Role.WORKER, 0, process("c"))
    for incarnation in ("a", "b"):
        with pytest.raises(SupersededMemberError):
            members.check(member(incarnation))


def test_a_registration_that_is_repeated_counts_once() -> None:
    members = Membership()
    for incarnation in ("a", "a", "b", "b", "b"):
        members = members.register(Role.WORKER, 0, process(incarnation))
    assert members.slot(Role.WORKER, 0).registrations == 2


def test_slots_are_apart() -> None:
    members = Membership().register(Role.WORKER, 0, process("a")).register(Role.PS, 0, process("a"))
    members = members.register(Role.WORKER, 1, process("a"))
    members = members.register(Role.WORKER, 0, process("b"))
    assert members.check(MemberId(Role.PS, 0, "a")).alive
    assert members.check(member("a", index=1)).alive


def test_who_never_registered_is_told_to() -> None:
    with pytest.raises(UnknownMemberError, match="register first"):
        Membership().check(member("a"))


def test_an_incarnation_whose_end_was_seen_is_refused_even_if_it_never_registered() -> None:
    members = Membership().exited(member("a"))
    with pytest.raises(SupersededMemberError):
        members.register(Role.WORKER, 0, process("a"))
    assert members.exited(member("a")) is members


def test_silence_is_forgiven_and_the_end_is_not() -> None:
    members = Membership().register(Role.WORKER, 0, process("a")).silent(member("a"))
    assert members.process(Role.WORKER, 0) is None
    assert members.given_up() == (member("a"),)
    members = members.spoke(member("a"))
    assert members.process(Role.WORKER, 0) is not None
    assert members.given_up() == ()
    members = members.exited(member("a"))
    assert members.process(Role.WORKER, 0) is None
    with pytest.raises(SupersededMemberError):
        members.spoke(member("a"))


@pytest.mark.parametrize("end", ["registration", "exit"])
def test_who_is_given_up_is_named_until_it_is_replaced_or_gone(end: str) -> None:
    members = Membership().register(Role.WORKER, 0, process("a")).expelled(member("a"))
    assert members.given_up() == (member("a"),)
    with pytest.raises(SupersededMemberError):
        members.spoke(member("a"))
    members = members.exited(member("a")) if end == "exit" else members.register(Role.WORKER, 0, process("b"))
    assert members.given_up() == ()


def test_the_end_of_an_old_incarnation_leaves_the_new_one_alone() -> None:
    members = Membership().register(Role.WORKER, 0, process("a")).register(Role.WORKER, 0, process("b"))
    members = members.exited(member("a"))
    assert members.check(member("b")).alive


def replaced(times: int) -> Membership:
    """A slot whose process was replaced this many times; the operator has reported the end of each but the last."""
    members = Membership()
    for number in range(times + 1):
        members = members.register(Role.WORKER, 0, process(f"{number:04}"))
        if number < times:
            members = members.exited(member(f"{number:04}"))
    return members


def test_a_slot_takes_no_more_room_however_often_its_process_is_replaced() -> None:
    few, many = (len(TypeAdapter(Membership).dump_json(replaced(times))) for times in (100, 1000))
    assert many - few <= 1  # the number of registrations has one digit more


def test_of_many_replaced_incarnations_the_newest_are_refused_and_their_ends_count_once() -> None:
    members = replaced(1000)
    for number in range(1000 - 64, 1000):
        with pytest.raises(SupersededMemberError):
            members.register(Role.WORKER, 0, process(f"{number:04}"))
        assert members.exited(member(f"{number:04}")) is members
    assert members.check(member("1000")).alive
