"""The operator's conversation with a master that comes late, leaves and comes back."""

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from structlog.testing import capture_logs

from certificates import certificates
from emberscale_api.certificates import Certificates
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.running import JobPlan
from emberscale_api.job.status import JobPhase, TrainingJobStatus
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc import tls
from emberscale_api.shape import RoleShape
from emberscale_operator import master_link
from emberscale_operator.kubernetes.status import Facts, build_status, to_document
from emberscale_operator.machine import ExitReason, InstanceExit, InstanceId, JobStanding, Scale
from emberscale_operator.master_bounds import bounded
from emberscale_operator.master_link import MasterAddress, MasterLink, retry_pause
from eventually import unwrap

TLS_HANDSHAKE = b"\x16"
"""The first byte of a client with TLS."""


async def start(
    version: int,
    port: int = 0,
    shown: Certificates | None = None,
    silent: pb.Member | None = None,
    hangs: asyncio.Event | None = None,
    final: pb.JobStatus | None = None,
    roles: Sequence[pb.RolePlan] = (),
    said: str = "",
    shutdown_fails: grpc.StatusCode = grpc.StatusCode.UNIMPLEMENTED,
    scaled: asyncio.Queue[pb.ScaleRequest] | None = None,
    held: asyncio.Queue[asyncio.Event] | None = None,
    told: asyncio.Event | None = None,
    streams: bool = False,
    refuses: bool = False,
) -> tuple[grpc.aio.Server, int]:
    """Starts a master with a plan of this version that reports to be training; while it `hangs`, it reports nothing.

    With `held`, each report waits for the event that it puts there; with `told`, the plan waits for that. It `streams`
    plans of later versions without end, or `refuses` the token.
    """

    async def status(request: pb.GetStatusRequest, context: grpc.aio.ServicerContext) -> pb.JobStatus:  # type: ignore[type-arg]  # generic in its stubs alone
        if refuses:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid token")
        if hangs is not None and hangs.is_set():
            await asyncio.Event().wait()
        if held is not None:
            goes_on = asyncio.Event()
            held.put_nowait(goes_on)
            await goes_on.wait()
        worker = pb.MemberStatus(member=pb.Member(role=pb.WORKER, index=2, incarnation="life-1"))
        return pb.JobStatus(phase=pb.TRAINING, message=said, members=[worker])

    asked = pb.ScaleRequest(ps=2, workers=4, waits="ps-1: ErrImagePull") if scaled is not None else None

    async def plans(request: pb.WatchPlanRequest, context: object) -> AsyncIterator[pb.Plan]:
        if told is not None:
            await told.wait()
        if request.newer_than < version:
            yield pb.Plan(
                version=version, silent=[silent] if silent is not None else [], final=final, roles=roles, asked=asked
            )
        later = version
        while streams:
            later += 1
            yield pb.Plan(version=later, roles=roles)
        await asyncio.Event().wait()

    async def shutdown(request: pb.ShutdownRequest, context: grpc.aio.ServicerContext) -> pb.ShutdownReply:  # type: ignore[type-arg]  # generic in its stubs alone
        return await context.abort(shutdown_fails, "")

    async def scale(request: pb.ScaleRequest, context: object) -> pb.ScaleReply:
        if scaled is not None:
            scaled.put_nowait(request)
        return pb.ScaleReply()

    server = grpc.aio.server()
    of_scale = grpc.unary_unary_rpc_method_handler(scale, pb.ScaleRequest.FromString, pb.ScaleReply.SerializeToString)
    of_shutdown = grpc.unary_unary_rpc_method_handler(
        shutdown, pb.ShutdownRequest.FromString, pb.ShutdownReply.SerializeToString
    )
    of_status = grpc.unary_unary_rpc_method_handler(
        status, pb.GetStatusRequest.FromString, pb.JobStatus.SerializeToString
    )
    of_plans = grpc.unary_stream_rpc_method_handler(plans, pb.WatchPlanRequest.FromString, pb.Plan.SerializeToString)
    name = pb.DESCRIPTOR.services_by_name["Master"].full_name
    handlers = {"GetStatus": of_status, "WatchPlan": of_plans, "Shutdown": of_shutdown, "Scale": of_scale}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    port = tls.bind(server, f"127.0.0.1:{port}", shown)
    await server.start()
    return server, port


class Link(MasterLink):
    """A link that can be waited for, also before it wakes anybody: it first asks a master that may be gone."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self._changed = asyncio.Event()
        super().__init__(*given, **named)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        self._changed.set()

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


def open_link(port: int, wake: Callable[[], None], authority: bytes | None = None) -> Link:
    return Link(MasterAddress(f"127.0.0.1:{port}", "token", authority), wake, time.monotonic, status_seconds=0.5)


@asynccontextmanager
async def linked(version: int, wake: Callable[[], None] = lambda: None, **options: Any) -> AsyncIterator[Link]:
    """Yields a link to a master that `start` starts."""
    server, port = await start(version, **options)
    link = open_link(port, wake)
    try:
        yield link
    finally:
        await link.close()
        await server.stop(None)


async def until_plan(link: MasterLink, woken: asyncio.Event, version: int) -> None:
    while not (link.answers and link.plan is not None and link.plan.version == version):
        woken.clear()
        await asyncio.wait_for(woken.wait(), 60)


async def test_what_a_job_came_to_is_known_from_a_master_that_is_gone_with_the_end() -> None:
    final = pb.JobStatus(phase=pb.COMPLETE, samples=54_000)
    hangs, woken = asyncio.Event(), asyncio.Event()
    async with linked(1, wake=woken.set, hangs=hangs, final=final) as link:
        await link.refresh_status()
        hangs.set()  # it answers no further call
        await link.until(lambda: link.status is not None and link.status.phase is JobPhase.COMPLETE)
        assert unwrap(link.status).samples == 54_000


async def test_a_report_from_before_the_end_that_comes_after_it_does_not_hide_the_end() -> None:
    final = pb.JobStatus(phase=pb.COMPLETE, samples=54_000)
    hangs, told, held = asyncio.Event(), asyncio.Event(), asyncio.Queue[asyncio.Event]()
    async with linked(1, hangs=hangs, final=final, told=told, held=held) as link:
        (await held.get()).set()
        await link.until(lambda: link.answers)
        late = await held.get()
        hangs.set()  # it answers no further call
        told.set()
        await link.until(lambda: link.status is not None and link.status.phase is JobPhase.COMPLETE)
        heard_at = link.report().heard_at
        late.set()
        await link.until(lambda: link.report().heard_at != heard_at)
        assert unwrap(link.status).samples == 54_000


async def test_a_master_that_streams_plans_without_end_is_heard_ten_times_a_second() -> None:
    async with linked(1, streams=True) as link:
        await link.until(lambda: link.plan is not None)
        began, first = time.monotonic(), unwrap(link.plan).version
        await link.until(lambda: unwrap(link.plan).version >= first + 50)
        assert time.monotonic() - began >= 2.0


async def test_what_a_master_says_is_brought_within_bounds() -> None:
    roles = [
        pb.RolePlan(role=pb.WORKER, replicas=1_000_000),
        pb.RolePlan(role=pb.PS, replicas=3, cpu_cores=float("inf")),
        pb.RolePlan(role=pb.MASTER, replicas=1, cpu_cores=2.0, memory_bytes=1 << 30),
    ]
    final = pb.JobStatus(phase=pb.COMPLETE, samples_per_second=float("nan"), eta_seconds=float("inf"))
    final.rows["a"] = 7
    final.warnings.extend(["w" * 5_000, *["w"] * 5_000])
    hangs = asyncio.Event()
    async with linked(1, hangs=hangs, final=final, roles=roles) as link:
        await link.refresh_status()
        hangs.set()
        await link.until(lambda: link.status is not None and link.status.phase is JobPhase.COMPLETE)
        assert link.plan is not None
        assert link.status is not None
        assert link.plan.shapes == {Role.MASTER: RoleShape(1, 2.0, 1 << 30)}
        assert (link.status.samples_per_second, link.status.eta_seconds) == (0.0, 1e15)
        assert (len(link.status.warnings), len(link.status.warnings[0])) == (4096, 4096)
        assert link.status.rows == {"a": 7}


async def test_sizes_that_no_cluster_has_are_told_once_however_often_a_master_repeats_them() -> None:
    roles = [pb.RolePlan(role=pb.WORKER, replicas=1_000_000)]
    with capture_logs() as told:
        async with linked(1, streams=True, roles=roles) as link:
            await link.until(lambda: link.plan is not None and link.plan.version > 3)
    assert [entry["fields"] for entry in told] == [["roles"]]


def test_metrics_may_be_no_number() -> None:
    told: list[str] = []
    status = bounded(pb.JobStatus(loss=math.nan, auc=math.nan, samples_per_second=math.nan), told.append)
    assert math.isnan(status.loss)
    assert math.isnan(status.auc)
    assert (told, status.samples_per_second) == (["samples_per_second"], 0.0)


def test_steps_and_reasons_of_a_master_are_brought_within_bounds() -> None:
    steps = [pb.ScalingStep(number=(1 << 63) + n, reason="CopiedRows", seconds=float("inf")) for n in range(1000)]
    plan = bounded(pb.Plan(reason="no reason!", sizing=pb.Sizing(reason="R" * 300, steps=steps)))
    assert (plan.reason, plan.sizing.reason) == ("", "")
    assert len(plan.sizing.steps) == 16
    assert (plan.sizing.steps[-1].number, plan.sizing.steps[-1].seconds) == (1 << 53, 1e15)
    assert plan.sizing.steps[-1].reason == "CopiedRows"


_EXTREME: Mapping[int, Any] = {
    FieldDescriptor.TYPE_UINT64: (1 << 64) - 1,
    FieldDescriptor.TYPE_UINT32: (1 << 32) - 1,
    FieldDescriptor.TYPE_BOOL: True,
    FieldDescriptor.TYPE_STRING: "x",
    FieldDescriptor.TYPE_ENUM: pb.TRAINING,
}


def extreme(message: Message, fraction: float) -> None:
    """Sets every number of a status, however deep, to a value that no job has."""
    for field in message.DESCRIPTOR.fields:
        told = getattr(message, field.name)
        value = fraction if field.type == FieldDescriptor.TYPE_DOUBLE else _EXTREME.get(field.type)
        if field.message_type is None and not field.is_repeated:
            setattr(message, field.name, value)
        elif field.message_type is None:
            told.extend([value, value])
        elif not field.message_type.GetOptions().map_entry:
            extreme(told.add() if field.is_repeated else told, fraction)
            if not field.is_repeated:
                told.SetInParent()
        elif field.message_type.fields_by_name["value"].message_type is not None:
            extreme(told["a"], fraction)
        else:
            entry = field.message_type.fields_by_name["value"]
            told["a"] = fraction if entry.type == FieldDescriptor.TYPE_DOUBLE else _EXTREME[entry.type]


@pytest.mark.parametrize("fraction", [math.nan, math.inf, -math.inf])
async def test_the_api_server_takes_the_status_of_a_job_whose_master_tells_nonsense(fraction: float) -> None:
    said = pb.JobStatus()
    extreme(said, fraction)
    said.phase, said.members[0].member.role = pb.TRAINING, pb.WORKER
    hangs = asyncio.Event()
    with capture_logs() as told:
        async with linked(1, hangs=hangs, final=said) as link:
            await link.refresh_status()
            hangs.set()
            await link.until(lambda: link.status is not None and link.status.samples)
            status = unwrap(link.status)
    facts = Facts(
        name="ctr",
        generation=1,
        standing=JobStanding(JobPhase.TRAINING),
        reason="Training",
        message="",
        demands=(),
        members=(),
        now=1e9,
        master=status,
        plan=JobPlan(sizing=status.sizing),
    )
    document = json.dumps(to_document(build_status(TrainingJobStatus(), facts)), allow_nan=False)
    numbers = [int(number) for number in re.findall(r"-?\d+(?![\d.])", document)]
    assert max(map(abs, numbers)) <= 1 << 53
    assert [entry["event"] for entry in told] == ["master_exceeds_bounds"]
    assert {"samples", "pls", "seconds"} <= set(told[0]["fields"])


async def test_a_status_of_many_megabytes_is_not_taken_in() -> None:
    async with linked(1, said="x" * (5 << 20)) as link:
        await link.refresh_status()
        assert link.status is None
        assert not link.answers


@pytest.mark.parametrize(
    ("code", "refused"),
    [(grpc.StatusCode.UNAVAILABLE, False), (grpc.StatusCode.FAILED_PRECONDITION, True)],
)
async def test_a_master_that_goes_away_as_it_is_told_to_end_has_not_refused(
    code: grpc.StatusCode, refused: bool
) -> None:
    async with linked(1, shutdown_fails=code) as link:
        await link.shut_down()
        report = link.report()
        assert report.cannot_be_told is refused
        assert (report.told_to_end_at is None) is refused


async def test_a_master_that_comes_late_and_again_is_heard() -> None:
    first, port = await start(1)
    await first.stop(None)  # nobody is there yet, at a port that is free
    woken = asyncio.Event()
    link = open_link(port, woken.set)
    try:
        await link.refresh_status()
        assert not link.answers
        second, _ = await start(2, port)
        await until_plan(link, woken, 2)
        assert unwrap(link.status).phase is JobPhase.TRAINING
        await second.stop(None)
        third, _ = await start(3, port)
        await until_plan(link, woken, 3)
        await third.stop(None)
    finally:
        await link.close()


async def test_members_that_the_master_gave_up_and_those_that_joined_are_passed_on() -> None:
    silent = pb.Member(role=pb.PS, index=1, incarnation="life-4")
    server, port = await start(1, silent=silent)
    woken = asyncio.Event()
    link = open_link(port, woken.set)
    try:
        await until_plan(link, woken, 1)
        assert link.report().silent == {MemberId(Role.PS, 1, "life-4")}
        assert link.report().joined == frozenset({MemberId(Role.WORKER, 2, "life-1")})
    finally:
        await link.close()
        await server.stop(None)


async def test_edits_are_told_to_the_master_which_says_what_it_has_heard() -> None:
    scaled = asyncio.Queue[pb.ScaleRequest]()
    server, port = await start(1, scaled=scaled)
    woken = asyncio.Event()
    link = open_link(port, woken.set)
    try:
        await until_plan(link, woken, 1)
        assert link.report().asked == Scale(2, 4, "ps-1: ErrImagePull")
        link.scale(Scale(3, 0, "why"))
        link.scale(Scale(3, 0, "why"))  # while it is being told
        assert await scaled.get() == pb.ScaleRequest(ps=3, waits="why")
        assert scaled.empty()
    finally:
        await link.close()
        await server.stop(None)


async def test_a_master_that_leaves_calls_unanswered_is_told_from_one_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hangs = asyncio.Event()
    server, port = await start(1, hangs=hangs)
    woken = asyncio.Event()
    link = open_link(port, woken.set)
    try:
        await until_plan(link, woken, 1)
        assert link.report().unanswered_since is None
        hangs.set()
        with monkeypatch.context() as impatient:
            impatient.setattr(master_link, "_CALL_SECONDS", 0.3)
            await link.refresh_status()
            since = link.report().unanswered_since
            await link.refresh_status()
        assert since is not None
        assert link.report().unanswered_since == since, "the first of the calls in a row counts"
        hangs.clear()
        await link.refresh_status()
        assert link.report().unanswered_since is None
    finally:
        await link.close()
        await server.stop(None)


async def test_a_master_that_refuses_the_token_is_told_from_one_that_is_away() -> None:
    """It has the token of a Secret that was deleted since; a successor gets that of the Secret of today."""
    server, port = await start(1, refuses=True)
    with capture_logs() as logs:
        link = open_link(port, lambda: None)
        try:
            await link.until(lambda: link.report().refuses)
            since = link.report().unanswered_since
            await link.refresh_status()
            assert since is not None
            assert link.report().unanswered_since == since
            assert not link.answers
        finally:
            await link.close()
            await server.stop(None)
    assert [entry["problem"] for entry in logs if entry["event"] == "master_unreachable"] == ["no valid token"]


async def test_a_master_with_tls_is_heard_by_who_knows_its_authority(tmp_path: Path) -> None:
    with capture_logs() as told:
        ours, theirs = certificates(tmp_path / "ours"), certificates(tmp_path / "theirs")
        server, port = await start(1, shown=ours)
        woken = asyncio.Event()
        link = open_link(port, woken.set, ours.authority)
        strangers = [open_link(port, asyncio.Event().set, authority) for authority in (theirs.authority, None)]
        try:
            await until_plan(link, woken, 1)
            while len(told) < len(strangers):  # a call that fails of a lack of time tells nothing of TLS
                for stranger in strangers:
                    await stranger.refresh_status()
                    assert not stranger.answers
            for stranger in strangers:
                await stranger.refresh_status()
        finally:
            for opened in (link, *strangers):
                await opened.close()
            await server.stop(None)
    problems = sorted(entry["problem"].partition(" ")[2] for entry in told)
    assert problems == [
        "presents a certificate that the authority in the job's Secret does not verify: self-signed certificate",
        "requires TLS, but the authority in the job's Secret is not set",
    ]


async def test_masters_that_fall_silent_in_a_handshake_keep_nothing_else_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls to the API server need a thread of the loop's pool, which has only a few."""
    monkeypatch.setattr(tls, "_PROBE_SECONDS", 60.0)
    asked, over = asyncio.Semaphore(0), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1) == TLS_HANDSHAKE:
            asked.release()
            await over.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    links = [open_link(port, lambda: None) for _ in range(40)]
    try:
        async with asyncio.timeout(60):
            for _ in links:
                await asked.acquire()
            await asyncio.to_thread(int)
    finally:
        over.set()
        for link in links:
            await link.close()
        server.close()


@pytest.mark.parametrize(("silent", "seconds"), [(0.0, 1.0), (8.0, 1.0), (32.0, 4.0), (3600.0, 8.0)])
def test_a_master_is_asked_less_often_the_longer_it_is_silent(silent: float, seconds: float) -> None:
    assert retry_pause(silent) == seconds


async def test_an_answer_that_was_long_under_way_hides_no_later_one() -> None:
    times, asked, answers = 0, asyncio.Event(), asyncio.Event()

    async def status(request: pb.GetStatusRequest, context: object) -> pb.JobStatus:
        nonlocal times
        times += 1
        mine = times
        asked.set()
        if mine == 1:
            await answers.wait()
        return pb.JobStatus(samples=mine)

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(
        status, pb.GetStatusRequest.FromString, pb.JobStatus.SerializeToString
    )
    name = pb.DESCRIPTOR.services_by_name["Master"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"GetStatus": handler}),))
    port = tls.bind(server, "127.0.0.1:0", None)
    await server.start()
    link = open_link(port, lambda: None)
    try:
        await asyncio.wait_for(asked.wait(), 60)  # by the task that follows the status
        later = asyncio.create_task(link.refresh_status())
        ended = InstanceExit(ExitReason.KILLED, -9, 0.0)
        await asyncio.create_task(link.report_exit(InstanceId(Role.PS, 0, 1), "life-1", ended))
        assert times == 1, "the master has answered a later call, so it would have heard this one"
        answers.set()
        seen: list[int] = []

        def note() -> bool:
            seen.append(link.status.samples if link.status is not None else 0)
            return seen[-1] >= 4

        await link.until(note)
        await later
        assert seen == sorted(seen)
    finally:
        await link.close()
        await server.stop(None)
