"""A job driven through the pure core alone."""

from dataclasses import replace
from typing import Any

from tests.jobmaster.small_job import job

from emberscale_api.dataset import DataFile
from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.status import JobPhase
from emberscale_api.routing import PsAddress, RoutingTable
from emberscale_jobmaster import lifecycle, progress, scaling, takeover, tasks
from emberscale_jobmaster.figures import phase_of
from emberscale_jobmaster.membership import Process
from emberscale_jobmaster.operations import CheckpointPurpose, Restored
from emberscale_jobmaster.placement import placed
from emberscale_jobmaster.state import JobState, Routing, Stage
from emberscale_jobmaster.tasks import Discovered, Finding, Indexed, Task
from eventually import unwrap

WORKER = MemberId(Role.WORKER, 0, "w")
TRAINING, EVALUATION = DataFile("/data/day_0", 1000), DataFile("/data/test", 500)


class Pure:
    """A job driven through the transitions that the machine consists of, without its operations."""

    def __init__(self, **sections: Any) -> None:
        self.spec: TrainingJobSpec = job(**sections).spec
        self.state: JobState = takeover.initial(wall=0.0)
        self.phases = [JobPhase.PENDING]

    def apply(self, state: JobState) -> None:
        self.state = progress.advance(self.state, state, self.spec)
        if (phase := phase_of(self.state, self.spec)) is not self.phases[-1]:
            self.phases.append(phase)

    def register(self, role: Role, index: int, incarnation: str) -> MemberId:
        member = MemberId(role, index, incarnation)
        process = Process(incarnation, "tcp://a", "a:1", "")
        self.apply(lifecycle.register(self.state, self.spec, member, process))
        return member

    def acquire(self, member: MemberId = WORKER, batches: int = 4) -> Task | None:
        state, task = tasks.acquire(self.state, self.spec, member, batches)
        self.apply(state)
        return task

    def work(self, finding: Finding = None) -> Task:
        """Leases one task and finishes it."""
        task = unwrap(self.acquire())
        self.apply(tasks.finish(self.state, self.spec, WORKER, task.token, finding))
        return task

    def prepare(self, records: int = 100, evaluation: int | None = None) -> None:
        if evaluation is None:
            self.prepare_with(Discovered((TRAINING,), ()), Indexed(records))
        else:
            self.prepare_with(Discovered((TRAINING,), (EVALUATION,)), Indexed(records), Indexed(evaluation))

    def prepare_with(self, *findings: Finding) -> None:
        for finding in findings:
            self.work(finding)

    def assign(self, **restored: Any) -> None:
        self.apply(progress.begin_assignment(self.state, self.spec))
        self.apply(progress.complete_assignment(self.state, Restored(**restored), checkpoint=""))

    def moved(self) -> None:
        """Moves the rows to the wanted number of servers."""
        target = unwrap(self.state.scaling.target)
        before, present = self.state.routing.table, self.state.members
        found = [(index, present.process(Role.PS, index)) for index in range(target.ps.replicas)]
        servers = tuple(
            PsAddress(index, process.incarnation, process.data_address, process.control_address)
            for index, process in found
            if process is not None
        )
        table = RoutingTable(
            before.generation,
            self.state.next_version,
            servers,
            placed(before.bucket_owners, len(servers)),
            placed(before.piece_owners, len(servers)),
        )
        state = replace(self.state, routing=Routing(table, ready=True), next_version=self.state.next_version + 1)
        self.apply(scaling.complete_move(state, target))

    def checkpointed(self, purpose: CheckpointPurpose, checkpoint: str = "00000001") -> None:
        """Completes a checkpoint that was taken for this purpose."""
        state = replace(self.state, checkpoint=checkpoint)
        if purpose is not CheckpointPurpose.PERIODIC:
            self.apply(replace(state, ends_with=purpose))

    def train_epoch(self) -> list[Task]:
        done, epoch = [], self.state.epoch
        while self.state.stage is Stage.TRAIN and self.state.epoch == epoch:
            done.append(self.work())
        return done

    def start_training(self, records: int = 100, evaluation: int | None = None) -> None:
        self.register(Role.WORKER, 0, WORKER.incarnation)
        for index in range(self.spec.ps.initial_replicas):
            self.register(Role.PS, index, f"ps-{index}")
        self.prepare(records, evaluation)
        self.assign()
