"""A job's candidates: points of its Pareto front, its present shape, and what changing from one to the other means.

The bill of a shape is what the rest of the job costs in it: (cost per hour + worth of an hour of the job) x hours left,
the change included. A running job only moves to a shape with a smaller bill, so no gain is bought for more than it is
worth; how much an hour is worth is the operator's to say.
"""

from dataclasses import dataclass

import numpy as np

from emberscale_api.shape import JobShape
from emberscale_brain.model.features import ModelConstants, features
from emberscale_brain.model.predict import Coefficients
from emberscale_brain.planner.front import Front
from emberscale_brain.planner.grid import Floats, Horizon, Ints, JobProblem
from emberscale_brain.planner.types import Candidate, Prices, ThroughputFit

DOUBT_PRICE = 0.5  # a bill that is uncertain by a standard deviation of 10% is taken to be 5% higher


@dataclass(frozen=True, slots=True)
class Candidates:
    """Shapes and numbers, one row each. Row 0 is the present shape of a running job.

    `gross` and `net` are samples/s without and with the change; `doubt` is the relative standard deviation of `gross`
    (about the present shape's, where there is one); `bill` is in the prices' currency, doubt included.
    """

    shapes: tuple[JobShape, ...]
    cost: Floats
    gross: Floats
    net: Floats
    doubt: Floats
    bill: Floats
    delay: Floats
    pause: Floats

    def __len__(self) -> int:
        return len(self.shapes)

    def take(self, rows: Ints) -> "Candidates":
        """Some of the rows."""
        return Candidates(
            tuple(self.shapes[int(row)] for row in rows),
            *(getattr(self, name)[rows] for name in ("cost", "gross", "net", "doubt", "bill", "delay", "pause")),
        )

    def point(self, row: int) -> Candidate:
        """A row as it is explained."""
        numbers = (float(column[row]) for column in (self.cost, self.gross, self.net, self.doubt))
        return Candidate(self.shapes[row], *numbers)


def dimensions(shapes: tuple[JobShape, ...]) -> tuple[Floats, ...]:
    """(workers, PS, worker cores, PS cores), float64[n] each."""
    rows = np.array([(s.workers, s.ps, s.worker_cpu, s.ps_cpu) for s in shapes], dtype=np.float64)
    return rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3]


def bills(cost: Floats, net: Floats, remaining_samples: float, time_value_per_hour: float) -> Floats:
    """What the remaining samples cost at `net` samples/s; float64[n]."""
    hours = remaining_samples / np.maximum(net, 1e-12) / 3600
    bill: Floats = (cost + time_value_per_hour) * hours
    return bill


def _double_bills(cost: Floats, delay: Floats, net: Floats, remaining_samples: float) -> Floats:
    """What a change costs on top: while new processes start, what the present shape (row 0) has more is paid too."""
    hours = np.minimum(delay, remaining_samples / np.maximum(net, 1e-12)) / 3600
    extra: Floats = np.maximum(0.0, cost[0] - cost) * hours
    return extra


def evaluate(
    shapes: tuple[JobShape, ...],
    constants: ModelConstants,
    fit: ThroughputFit,
    prices: Prices,
    horizon: Horizon,
    remaining_samples: float,
    time_value_per_hour: float,
) -> Candidates:
    """All numbers of some shapes. With a present shape, it must come first: doubt is about the difference to it."""
    w, p, cpu_w, cpu_p = dimensions(shapes)
    x = features(constants, w, p, cpu_w, cpu_p)
    model = Coefficients.of(fit)
    seconds = model.iteration_seconds(x)
    gross = w * constants.batch_size / seconds
    net = horizon.net(gross, w, p, cpu_w, cpu_p)
    delay, pause = horizon.disturbance(w, p, cpu_w, cpu_p)
    relative = model.slopes(x) / seconds[:, None]
    difference = relative - relative[0] if horizon.current is not None else relative
    doubt = np.sqrt(np.maximum(np.einsum("ni,ij,nj->n", difference, model.covariance, difference), 0.0))
    cost = np.array([prices.per_hour(shape) for shape in shapes])
    bill = bills(cost, net, remaining_samples, time_value_per_hour)
    if horizon.current is not None:
        bill += _double_bills(cost, delay, net, remaining_samples)
    bill *= 1 + DOUBT_PRICE * doubt
    return Candidates(shapes, cost, gross, net, doubt, bill, delay, pause)


def front_shapes(
    front: Front, problem: JobProblem, remaining_samples: float, time_value_per_hour: float, most: int
) -> tuple[JobShape, ...]:
    """At most `most` shapes spread over a front, and those about its smallest bill, by rising cost."""
    bill = bills(front.cost, front.throughput, remaining_samples, time_value_per_hour)
    x = features(problem.constants, *front.choices.T)
    doubt = Coefficients.of(problem.fit).uncertainty(x)
    sure, likely = int(np.argmin(bill * (1 + DOUBT_PRICE * doubt))), int(np.argmin(bill))
    about = np.concatenate([np.arange(best - 2, best + 3) for best in (sure, likely)])
    about = about[(about >= 0) & (about < len(front))]
    return tuple(front.shape(int(index)) for index in np.union1d(front.spread(most - 10), about))


def worker_only_shapes(problem: JobProblem, present: JobShape, most: int) -> tuple[JobShape, ...]:
    """Shapes that differ from the present one in the number of workers only: the cheapest changes there are.

    Memory stays as it is.
    """
    counts = problem.grid.workers[problem.grid.workers != present.workers]
    if len(counts) > most:
        counts = counts[np.unique(np.linspace(0, len(counts) - 1, most).round().astype(np.int64))]
    return tuple(
        JobShape(int(workers), present.ps, present.worker_cpu, present.ps_cpu, present.worker_memory, present.ps_memory)
        for workers in counts
    )
