"""Live moves, as the master's machine drives them, where a scenario's commands cannot say what happens."""

from tests.jobmaster.driven import Driven

from emberscale_api.job.roles import Role
from emberscale_jobmaster.events import Beat


def training(servers: int = 2, interval: float = 1000.0) -> Driven:
    """A job that has trained a little and may have any number of servers."""
    driven = Driven(servers=2, interval=interval, sizes_open=True)
    driven.start()
    driven.train(4)
    if servers > 2:
        driven.plan(servers)
        for index in range(2, servers):
            driven.join(Role.PS, index)
    return driven


def test_a_late_heartbeat_of_a_server_that_has_left_changes_nothing() -> None:
    driven = training(3)
    left = driven.ps[2]
    said = left.generation, left.version
    driven.plan(2)
    assert len(driven.job.routing.table.servers) == 2
    for generation, version in (said, (left.generation, left.version)):
        driven.tell(Beat(now=driven.now, member=left.member, generation=generation, version=version))
    assert driven.job.recoveries == 0
    assert driven.job.routing.ready
