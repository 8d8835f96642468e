"""A walk over the maps, lists and single values of a message."""

from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.fields import PresentField, present_fields


def status() -> pb.PsReport:
    return pb.PsReport(rows={"a": 1, "b": 2, "c": 3}, admission={"a": pb.AdmissionCounts()}, table_bytes=7)


def by_name(message: pb.PsReport | pb.LeaseTokens) -> dict[str, PresentField]:
    return {present.name: present for present in present_fields(message)}


def test_only_what_is_set_is_walked() -> None:
    assert set(by_name(status())) == {"rows", "admission", "table_bytes"}
    assert not list(present_fields(pb.PsReport()))


def test_a_map_is_described_by_its_values_and_changed_in_place() -> None:
    report = status()
    rows = by_name(report)["rows"]
    assert (rows.field.name, rows.is_single, rows.is_message) == ("value", False, False)
    assert sorted(zip(rows.keys, rows.values, strict=True)) == [("a", 1), ("b", 2), ("c", 3)]
    rows.replace(lambda count: 10 * count)
    assert dict(report.rows) == {"a": 10, "b": 20, "c": 30}
    rows.cut(2)
    assert len(report.rows) == 2


def test_every_value_of_a_large_map_is_changed_once() -> None:
    names = [f"table-{number}" for number in range(1000)]
    report = pb.PsReport(rows=dict.fromkeys(names, 1))
    by_name(report)["rows"].replace(lambda count: 10 * count)
    assert dict(report.rows) == dict.fromkeys(names, 10)


def test_messages_in_a_map_are_the_ones_within() -> None:
    report = status()
    admission = by_name(report)["admission"]
    assert admission.is_message
    field = pb.AdmissionCounts.DESCRIPTOR.fields[0].name
    setattr(admission.values[0], field, 5)
    assert getattr(report.admission["a"], field) == 5


def test_a_list_is_cut_and_changed_in_place() -> None:
    tokens = pb.LeaseTokens(live=[1, 2, 3], next=4)
    live = by_name(tokens)["live"]
    assert (live.keys, live.values, live.is_single) == ([], [1, 2, 3], False)
    live.cut(2)
    live.replace(lambda token: token + 1)
    assert list(tokens.live) == [2, 3]


def test_a_single_value_is_changed_in_its_message() -> None:
    tokens = pb.LeaseTokens(live=[1], next=4)
    following = by_name(tokens)["next"]
    assert (following.keys, following.values, following.is_single) == ([], [4], True)
    following.cut(0)
    following.replace(lambda token: token + 1)
    assert tokens.next == 5
