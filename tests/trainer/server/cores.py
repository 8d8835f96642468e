"""Cores of one parameter server that serve rows, and the calls that the tests make to them."""

import numpy as np

from emberscale_api.wire import Header, Kind, Status
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.barrier import Outcome
from emberscale_trainer.server.core import Assigning, Assignment, ServerCore, Wait
from emberscale_trainer.server.staleness import StalenessBound
from moves import EVERYTHING, table_of

NO_KEYS = np.empty(0, dtype=np.int64)
NO_COUNTS = np.zeros(2, dtype=np.uint32)


def serving(generation: int = 1, version: int = 1, bound: StalenessBound | None = None) -> ServerCore:
    core = ServerCore()
    assign(core, generation, version, bound)
    return core


def assign(core: ServerCore, generation: int, version: int, bound: StalenessBound | None = None) -> None:
    wanted = Assignment(generation, version, "")
    assert core.assign(wanted) is Assigning.LOAD
    assert core.adopt(wanted, EVERYTHING, AppliedBatches(), bound)


def switched(core: ServerCore, barrier: int, version: int, generation: int = 1, now: float = 0.0) -> Outcome:
    """Switches to a move that changes only the version, and whose number is the version."""
    core.prepare(version, core.known[1], table_of(version, generation=generation), 0, now)
    return core.switch(generation, barrier, version, AppliedBatches(), None, now)[0]


def header(batch: int, token: int = 1, shard: int = 0, generation: int = 1, version: int = 1) -> Header:
    return Header(Kind.PUSH, generation=generation, version=version, batch=batch, shard=shard, token=token)


def push(core: ServerCore, request: Header, session: int = 0, now: float = 0.0) -> Status | Wait:
    decision = core.push(session, request, now, now)
    if decision is Status.OK:
        core.record(session, request, now)
    return decision
