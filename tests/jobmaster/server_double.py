"""A parameter server of a driven job: what it has applied, and how it answers the master's calls."""

from dataclasses import dataclass, field

from tests.jobmaster.storage_double import Holding, StorageDouble, as_holding, as_ranges

from emberscale_api.job.roles import MemberId
from emberscale_api.routing import RoutingTable
from emberscale_jobmaster.effects import (
    AbandonCall,
    AssignCall,
    CopyCall,
    HandOverCall,
    HoldCall,
    PrepareCall,
    ResumeCall,
    SavedCall,
    ServerRequest,
    SettleCall,
    SnapshotCall,
    SwitchCall,
)
from emberscale_jobmaster.events import AppliedReport, Loaded, Prepared, Saved, ServerAnswer
from emberscale_jobmaster.operations import CopyReport
from emberscale_jobmaster.parity import ParityOrder

Answer = ServerAnswer | str | None
"""To a call: an answer, why it is refused, or None if nobody waits for one."""


@dataclass
class ServerDouble:
    """A parameter server that remembers what it has applied.

    `lost`: what servers had applied when they died, by index, which is what the parity of their rows has.
    With `forgets_anew`, it runs a version that takes the batches of another job's checkpoint for applied.
    """

    member: MemberId
    storage: StorageDouble
    lost: dict[int, Holding]
    forgets_anew: bool = False
    generation: int = 0
    version: int = 0
    applied: Holding = field(default_factory=dict)
    held: int | None = None
    over: int = 0
    snapshots: dict[int, tuple[str, Holding]] = field(default_factory=dict)
    move: tuple[int, RoutingTable] | None = None
    moves_over: int = 0
    owns: bool = False
    switched: int = 0
    rebuilds: tuple[int, ...] = ()
    on_demand: bool = False
    parity: int = 0
    async_parity: bool = False

    def apply(self, batch: int, epoch: int = 0) -> None:
        """Applies a batch."""
        self.applied.setdefault(epoch, set()).add(batch)

    def let_go(self) -> None:
        """Resumes pushes; the barrier that held them is over."""
        if self.held is not None:
            self.over = max(self.over, self.held)
        self.held = None

    def answer(self, request: ServerRequest) -> Answer:
        """Carries out a request."""
        match request:
            case AssignCall():
                return self._load(request)
            case HoldCall(barrier=number):
                if number <= self.over:
                    return f"barrier {number} is over"
                self.held = number
                return AppliedReport(as_ranges(self.applied))
            case SettleCall(barrier=number, settle=settle):
                if self.held != number:
                    return _not_held(number)
                for epoch, batches in as_holding(settle).items():
                    self.applied.setdefault(epoch, set()).update(batches)
                return AppliedReport(as_ranges(self.applied))
            case SnapshotCall(barrier=number, checkpoint=checkpoint):
                self.storage.begin(request)
                if self.held != number:
                    return _not_held(number)
                copy = {epoch: set(batches) for epoch, batches in self.applied.items()}
                self.snapshots[number] = (checkpoint, copy)
                self.let_go()
                return AppliedReport(as_ranges(copy), held_seconds=0.01)
            case SavedCall(barrier=number):
                checkpoint, copy = self.snapshots[number]
                files = self.storage.save(checkpoint, copy, self.member.index)
                return Saved(done=True, written_bytes=10, files=files)
            case PrepareCall():
                return self._prepare(request)
            case AbandonCall():
                self.move, self.moves_over = None, max(self.moves_over, request.move)
                return None
            case CopyCall() | HandOverCall() | SwitchCall():
                return self._continue_move(request)
            case ResumeCall(barrier=number):
                self.over = max(self.over, number)
                if self.held is not None and self.held <= number:
                    self.held = None
                return None

    def _obey(self, order: ParityOrder) -> None:
        self.parity = 0 if order.is_forgone else order.parity
        self.async_parity = order.is_async

    def _load(self, request: AssignCall) -> ServerAnswer:
        table, checkpoint = request.table, request.checkpoint
        self._obey(request.parity)
        if (table.generation, table.version) != (self.generation, self.version):
            self.generation, self.version = table.generation, table.version
            is_kept = bool(checkpoint) and (self.forgets_anew or not request.anew)
            self.applied = self.storage.load(checkpoint) if is_kept else {}
            self.move, self.owns = None, True
            self.let_go()
        return Loaded(done=True, loaded_bytes=1, applied=as_ranges(self.applied))

    def _prepare(self, request: PrepareCall) -> Answer:
        if request.move > self.moves_over:
            serves = self.version if self.owns and self.generation == request.table.generation else 0
            if serves != request.since and (self.move is None or self.move[0] != request.move):
                return f"version {serves} is served"
            if request.lost and self.owns and self.async_parity and not request.knows_async_parity:
                return "rebuilt rows may lack batches, and this master would not know which"
            self.move, self.rebuilds = (request.move, request.table), request.lost
            self.on_demand = request.on_demand
            self._obey(request.parity)
        if self.move is None or self.move[0] != request.move:
            return _not_under_way(request.move)
        return Prepared(done=True)

    def _continue_move(self, request: CopyCall | HandOverCall | SwitchCall) -> Answer:
        if isinstance(request, SwitchCall) and self.switched == request.move:
            return AppliedReport(as_ranges(self.applied))
        if self.move is None or self.move[0] != request.move:
            return _not_under_way(request.move)
        match request:
            case CopyCall() if self.rebuilds and self.owns:
                rebuilt = {index: as_ranges(self.lost.get(index, {})) for index in self.rebuilds}
                return CopyReport(True, 1000, 0, rebuilt)
            case CopyCall():
                return CopyReport(ready=True, copied_bytes=1000, rounds=2)
            case HandOverCall(barrier=number):
                return AppliedReport(as_ranges(self.applied)) if self.held == number else _not_held(number)
            case SwitchCall():
                return self._switch(request, self.move[1])

    def _switch(self, request: SwitchCall, table: RoutingTable) -> Answer:
        keeps = bool(self.rebuilds) and self.owns
        joins = not keeps and not (self.owns and self.generation == table.generation)
        if self.held != request.barrier and not keeps and not joins:
            return _not_held(request.barrier)
        self.let_go()
        if joins:  # the others keep what they have applied
            self.applied = as_holding(request.applied)
        self.owns = any(one.index == self.member.index for one in table.owners)
        self.generation, self.version = table.generation, table.version
        self.move, self.moves_over, self.switched = None, request.move, request.move
        return AppliedReport(as_ranges(self.applied))


def _not_held(barrier: int) -> str:
    return f"barrier {barrier} is not held"


def _not_under_way(move: int) -> str:
    return f"move {move} is not under way"
