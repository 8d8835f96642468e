"""A job's candidates: points of its Pareto front, its present shape, and the cost of changing from one to another.

`best_experiment` finds a small change of shape that teaches more than it costs. A measurement at a new shape moves the
fitted coefficients by k Z, Z standard normal and k = Sigma x / sd of the measurement: one step of a Kalman filter. A
bill is linear in the iteration time and so in the coefficients (to first order where the terms overlap). The worth of
a measurement is therefore the least bill now, less the expected least bill after it (the knowledge gradient).
"""

from dataclasses import dataclass

import numpy as np

from emberscale_api.shape import JobShape
from emberscale_brain.model.predict import Coefficients, ModelConstants, features
from emberscale_brain.planner.front import Front
from emberscale_brain.planner.grid import Floats, Horizon, Ints, JobProblem
from emberscale_brain.planner.types import Candidate, Prices, ShapeBounds, ThroughputFit

DOUBT_PRICE = 0.5  # a bill with a standard deviation of 10% counts as 5% higher


@dataclass(frozen=True, slots=True)
class Candidates:
    """Shapes and numbers, one row each. Row 0 is the present shape of a running job.

    `gross` and `net` are samples/s without and with the change; `doubt` is the relative standard deviation of `gross`
    (relative to the present shape's, if there is one); `bill` is in the prices' currency, doubt included.
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
        """Returns some of the rows."""
        return Candidates(
            tuple(self.shapes[int(row)] for row in rows),
            *(getattr(self, name)[rows] for name in ("cost", "gross", "net", "doubt", "bill", "delay", "pause")),
        )

    def point(self, row: int) -> Candidate:
        """Returns a row, for explanations."""
        numbers = (float(column[row]) for column in (self.cost, self.gross, self.net, self.doubt))
        return Candidate(self.shapes[row], *numbers)


def dimensions(shapes: tuple[JobShape, ...]) -> tuple[Floats, ...]:
    """(workers, PS, worker cores, PS cores), float64[n] each."""
    rows = np.array([(s.workers, s.ps, s.worker_cpu, s.ps_cpu) for s in shapes], dtype=np.float64)
    return rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3]


def bills(cost: Floats, net: Floats, remaining_samples: float, time_value_per_hour: float) -> Floats:
    """The cost of the remaining samples at `net` samples/s; float64[n]."""
    hours = remaining_samples / np.maximum(net, 1e-12) / 3600
    bill: Floats = (cost + time_value_per_hour) * hours
    return bill


def _double_bills(cost: Floats, delay: Floats, net: Floats, remaining_samples: float) -> Floats:
    """The extra cost of a change: the job pays the present shape's (row 0) surplus while new processes start."""
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
    """Computes all numbers of some shapes. A present shape must come first: `doubt` is relative to it."""
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
    """Returns shapes spread over a front and shapes around its smallest bill, at most `most`, by rising cost."""
    bill = bills(front.cost, front.throughput, remaining_samples, time_value_per_hour)
    x = features(problem.constants, *front.choices.T)
    doubt = Coefficients.of(problem.fit).uncertainty(x)
    sure, likely = int(np.argmin(bill * (1 + DOUBT_PRICE * doubt))), int(np.argmin(bill))
    about = np.concatenate([np.arange(best - 2, best + 3) for best in (sure, likely)])
    about = about[(about >= 0) & (about < len(front))]
    return tuple(front.shape(int(index)) for index in np.union1d(front.spread(most - 10), about))


def worker_only_shapes(problem: JobProblem, present: JobShape, most: int) -> tuple[JobShape, ...]:
    """Returns shapes that differ from the present one only in the number of workers: the cheapest changes.

    Memory stays as it is.
    """
    counts = problem.grid.workers[problem.grid.workers != present.workers]
    if len(counts) > most:
        counts = counts[np.unique(np.linspace(0, len(counts) - 1, most).round().astype(np.int64))]
    return tuple(
        JobShape(int(workers), present.ps, present.worker_cpu, present.ps_cpu, present.worker_memory, present.ps_memory)
        for workers in counts
    )


DWELL_SECONDS = 240.0
"""The time that a job stays at a shape to be measured there."""

_PROFILES = 8.0  # per dwell
_MISFIT = 0.02
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(15)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()
_LEAST_DWELLS = 6  # no experiments if less time than this remains, in dwells


@dataclass(frozen=True, slots=True)
class Experiment:
    """A change to try: its row among the trials, and the worth and cost of its measurement, in the prices' currency."""

    row: int
    worth: float
    cost: float


def neighbours(present: JobShape, bounds: ShapeBounds) -> tuple[JobShape, ...]:
    """Returns shapes that differ a little in one dimension: by a step, or by about a third if that is more.

    Their cores are multiples of the step, to the last bit those of the planner's grid, or a bound.
    """

    def around(value: float, low: float, high: float, step: float) -> list[float]:
        change = max(step, round(value / 3 / step) * step)
        near = [v for v in (value - change, value + change) if low - 1e-9 <= v <= high + 1e-9]
        return [min(max(round(v / step) * step, low), high) for v in near]

    w, p, cpu_w, cpu_p = present.workers, present.ps, present.worker_cpu, present.ps_cpu
    memory = (present.worker_memory, present.ps_memory)
    tables = present.ps * present.ps_memory
    return (
        *(JobShape(int(n), p, cpu_w, cpu_p, *memory) for n in around(w, *bounds.workers, 1)),
        *(
            JobShape(w, int(n), cpu_w, cpu_p, memory[0], min(max(memory[1], round(tables / n)), bounds.ps_memory[1]))
            for n in around(p, *bounds.ps, 1)
            if tables / n <= bounds.ps_memory[1]
        ),
        *(JobShape(w, p, c, cpu_p, *memory) for c in around(cpu_w, *bounds.worker_cpu, bounds.cpu_step)),
        *(JobShape(w, p, cpu_w, c, *memory) for c in around(cpu_p, *bounds.ps_cpu, bounds.cpu_step)),
    )


def best_experiment(
    trials: Candidates,
    options: Candidates,
    constants: ModelConstants,
    fit: ThroughputFit,
    remaining_samples: float,
    time_value_per_hour: float,
    exploration: float = 1.0,
) -> Experiment | None:
    """Returns the trial whose value, times `exploration`, most exceeds its cost; None if none does.

    `options` are the shapes that the job could move to afterwards, the present one first; `trials` evaluates changes
    from the present one.
    """
    present_seconds = remaining_samples / float(options.gross[0])
    if not len(trials) or present_seconds < _LEAST_DWELLS * DWELL_SECONDS:
        return None
    model = Coefficients.of(fit)
    x = features(constants, *dimensions(trials.shapes))
    seconds = model.iteration_seconds(x)
    measurement = seconds**2 * (fit.noise**2 / _PROFILES + _MISFIT**2)
    trial_slopes = model.slopes(x)
    gain = trial_slopes @ model.covariance  # rows: Sigma x
    k = gain / np.sqrt(np.einsum("ni,ni->n", gain, trial_slopes) + measurement)[:, None]

    left = max(0.0, 1 - DWELL_SECONDS / present_seconds)
    option_x = features(constants, *dimensions(options.shapes))
    workers = np.array([shape.workers for shape in options.shapes], dtype=np.float64)
    per_second = (
        (options.cost + time_value_per_hour) * remaining_samples * left / (workers * constants.batch_size) / 3600
    )
    now = per_second * model.iteration_seconds(option_x) * options.gross / np.maximum(options.net, 1e-12)
    slopes = per_second[:, None] * (model.slopes(option_x) @ k.T)  # [options, trials]
    after = (now[:, None, None] + slopes[:, :, None] * _NODES).min(axis=0) @ _WEIGHTS
    worth = exploration * (float(now.min()) - after)

    cost = _costs(trials, options, remaining_samples, time_value_per_hour)
    best = int(np.argmax(worth - cost))
    if worth[best] <= cost[best]:
        return None
    return Experiment(best, float(worth[best]), float(cost[best]))


def _costs(trials: Candidates, options: Candidates, remaining_samples: float, time_value_per_hour: float) -> Floats:
    """The cost of the change there and back, and of the difference in price per sample during the dwell."""
    rate = (trials.cost + time_value_per_hour) / 3600
    per_sample = rate / trials.gross
    present = float((options.cost[0] + time_value_per_hour) / 3600 / options.gross[0])
    samples = np.minimum(trials.gross * DWELL_SECONDS, remaining_samples)
    cost: Floats = 2 * trials.pause * rate + (per_sample - present) * samples + trials.delay * trials.cost / 3600
    return np.maximum(cost, 0.0)
