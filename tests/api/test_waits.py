"""Tests wait for what happens, not for time: these functions alone let time pass."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SHORT_SECONDS = 1.0
"""A wait of at most so long is a pause, alone or in a loop: a limit on what must happen is longer."""

ALLOWED = {
    "support/eventually.py eventually": "the poll for real processes, and for threads without an event",
    "support/eventually.py until": "the same in an event loop",
    "support/prometheus_server.py is_up": "one look, at a server that may hang",
    "support/status_watch.py keep_looking": "looks at a cluster while a test goes on, and waits for nothing",
    "support/unhurried_model.py forward": "a slow model",
    "jobmaster/fake_worker.py _insist": "a worker's pause before it calls a master again that is away",
    "jobmaster/fake_worker.py _may_train": "a worker's heartbeats",
    "operator/stand_in.py be_a_member": "a member's heartbeats",
    "trainer/server/test_dataplane.py drip": "the pace of an attack",
    "trainer/server/protection/test_rows_on_demand.py "
    "test_rows_that_are_wanted_without_memory_are_tried_again_after_a_pause": "time for tries without a pause",
    "trainer/server/control/test_moves.py held_up": "time for a rival call to reach the lock that must stop it",
    "trainer/worker/test_rounds.py median_meanwhile": "time for a rival thread to reach the lock that must stop it",
    "sdk/test_client.py test_waiting_is_given_up_in_time_and_says_where_the_job_stands": "tests a time limit",
    "sdk/test_client.py test_a_drain_waits_no_longer_than_it_may": "tests a time limit",
    "e2e/test_scale.py strike": "the length of a fault",
    "e2e/test_network_faults.py test_a_partition_heals_without_loss": "the length of a fault",
    "e2e/test_network_faults.py test_a_partition_shorter_than_a_lease_costs_no_process": "the length of a fault",
    "e2e/test_network_faults.py test_a_move_between_servers_that_are_parted_is_made_later": "the length of a fault",
    "kubernetes/test_node_loss.py test_a_node_that_is_cut_off_and_comes_back_does_no_harm": "the length of a fault",
}


def test_only_listed_functions_let_time_pass() -> None:
    found = {f"{path.relative_to(TESTS)} {name}" for path in TESTS.rglob("*.py") for name in idlers(path.read_text())}
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    ("body", "idles"),
    [
        ("time.sleep(0.1)", True),
        ("sleep(PAUSE)", True),
        ("await asyncio.sleep(0.01)", True),
        ("while not found: await asyncio.sleep(0)", True),
        ("await asyncio.sleep(0)", False),
        ("assert not answered.wait(0.3)", True),
        ("while not found: threading.Event().wait(0.02)", True),
        ("asyncio.wait({later}, timeout=0.3)", True),
        ("await asyncio.wait_for(found, 0.3)", True),
        ("later.join(0.5)", True),
        ("later.join(60)", False),
        ("events.get(timeout=0.3)", True),
        ("assert answered.wait(60)", False),
        ("pushing.result(timeout=0)", False),
        ("yield self.sleep(1.0)", False),
    ],
)
def test_a_sleep_and_a_wait_of_at_most_a_second_let_time_pass(body: str, idles: bool) -> None:
    assert list(idlers(f"async def it():\n    {body}\n")) == (["it"] if idles else [])


def idlers(source: str) -> Iterator[str]:
    """Yields the names of functions that let time pass."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(idles(part) for part in parts_of(node)):
            yield node.name


def parts_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what is below a node, without the functions that are defined there."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from parts_of(child)


def idles(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(ast.Name("time" | "asyncio"), "sleep") | ast.Name("sleep"), args=[seconds]):
            return not (isinstance(seconds, ast.Constant) and seconds.value == 0)
        case ast.While():
            return "asyncio.sleep(0)" in (ast.unparse(part) for part in parts_of(node) if isinstance(part, ast.Call))
        case ast.Call(func=ast.Attribute(attr="wait" | "join"), args=[limit]) if is_short(limit):
            return True
        case ast.Call(func=ast.Attribute(attr="wait_for"), args=[_, limit]) if is_short(limit):
            return True
        case ast.Call(keywords=keywords):
            return any(word.arg == "timeout" and is_short(word.value) for word in keywords)
    return False


def is_short(limit: ast.expr) -> bool:
    match limit:
        case ast.Constant(int() | float() as seconds):
            return 0 < seconds <= SHORT_SECONDS
    return False
