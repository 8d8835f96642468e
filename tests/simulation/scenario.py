"""What a scenario is: the job, the state of the network, what people and the brain want, and the faults."""

from dataclasses import dataclass
from random import Random

from tests.simulation.faults import HORIZON, Fault

from emberscale_api.job import MOST_STRIPE_WIDTH, TrainingJob, TrainingJobSpec
from emberscale_trainer.server.lag import LagBound

MOST_SERVERS = 4

GRACE_SECONDS = 10.0
"""The grace in which a server may drain before it is killed."""


@dataclass(frozen=True)
class Scenario:
    """A job and its faults; `quiet_after` is when they are over.

    * `batches`, `evaluation_batches`: batches of one epoch. `compute_seconds`: how long one takes.
    * `slow`, `lossy`: probabilities that a message is late or lost.
    * `rescales`: when the brain wants another number of servers, and which.
    * `edits`: when a person edits the numbers in the manifest, and to which: PS and workers.
    * `drains`: when a parameter server is asked to go because its node is drained, and which.
    * `room`: the number of servers for which the cluster has room; others are never placed.
    * `target_pls`: the portion of samples that partial recoveries may lose; 0: every recovery is full.
    * `rounds`: the most batches of a round; 0: no rounds, 1: as many as `RoundLengths` says.
    * `parity`: the parity that servers keep of each other's rows; 0: none. `most_width`: the most servers whose rows
      share parity.
    * `lag`: how far it may lag behind pushes; None: not at all.
    * `outdated`: the part of the servers, by incarnation, that cannot rebuild rows on demand.
    * `dawdling`: the probability that the master delays a call, as if it got no CPU.
    * `placing_seconds`: how long the successor of a parameter server waits for a place.
    """

    seed: int
    workers: int
    servers: int
    batches: int
    epochs: int
    evaluation_batches: int
    max_staleness: int
    pull_ahead: int
    interval: float
    compute_seconds: float
    slow: float
    lossy: float
    dawdling: float
    faults: tuple[Fault, ...]
    rescales: tuple[tuple[float, int], ...] = ()
    edits: tuple[tuple[float, int, int], ...] = ()
    drains: tuple[tuple[float, int], ...] = ()
    room: int = MOST_SERVERS
    target_pls: float = 0.0
    parity: int = 0
    most_width: int = MOST_STRIPE_WIDTH
    rounds: int = 0
    lag: LagBound | None = None
    placing_seconds: float = 0.0
    outdated: float = 0.0

    def rebuilds_on_demand(self, incarnation: str) -> bool:
        """Whether a parameter server knows how to serve rows that follow."""
        return Random(f"{incarnation} of {self.seed}").random() >= self.outdated

    @property
    def quiet_after(self) -> float:
        """When the last fault has passed, and the network calms down."""
        return max(
            [
                *(fault.over_at for fault in self.faults),
                *(at for at, _, _ in self.edits),
                *(at + GRACE_SECONDS for at, _ in self.drains),
                HORIZON if self.slow or self.lossy or self.dawdling else 0.0,
            ]
        )

    def spec(self) -> TrainingJobSpec:
        """Returns the job's manifest, in which a record is a batch."""
        return TrainingJob.model_validate(
            {
                "apiVersion": "emberscale.io/v1alpha1",
                "kind": "TrainingJob",
                "metadata": {"name": "simulated"},
                "spec": {
                    "data": {"train": ["train"], **({"evaluation": ["evaluation"]} if self.evaluation_batches else {})},
                    "training": {
                        "batchSize": 1,
                        "epochs": self.epochs,
                        "maxStaleness": self.max_staleness,
                        "stalenessWarmup": 0,
                        "pullAhead": self.pull_ahead,
                        "prefetchBatches": 1,
                    },
                    "ps": {"minReplicas": 1 + self.parity, "maxReplicas": MOST_SERVERS},
                    "worker": {"replicas": self.workers},
                    "sharding": {
                        "minBatches": 1,
                        "maxBatches": 12 if self.rounds else 6,
                        "leaseTimeout": "8s",
                        "heartbeatInterval": "2s",
                    },
                    "scaling": {"timeout": "6s"},
                    "checkpoint": {"uri": "/checkpoints", "interval": f"{self.interval:g}s"},
                    "faultTolerance": self._fault_tolerance(),
                },
            }
        ).spec

    def _fault_tolerance(self) -> dict[str, object]:
        if self.parity:
            durability = "Async" if self.lag is not None else "Sync"
            return {"strategy": "ErasureCoding", "parity": self.parity, "durability": durability}
        return {"strategy": "PartialRecovery", "targetPLS": self.target_pls} if self.target_pls else {}
