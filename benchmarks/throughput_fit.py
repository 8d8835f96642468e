"""How well the throughput model predicts shapes that it has not seen.

Synthetic: profiles with 5% noise from the coefficients that DLRover-RM reports (section 6.2: 3.48, 2.36, 0.68, 2.45;
the betas sum up to 2.45), so the model's form is right by construction; what is measured is what noise and outliers do
to the fit. Errors are relative errors of iteration time over a grid of 8,192 shapes of which the profiles cover a few.

Real: profiles of a real `emberscale run` at a dozen or more shapes (`real_profiles.py`). A third of the shapes is held
out at random, several times; the error is the RMSLE of predicted against measured throughput at those. It takes
minutes, and a machine that does nothing else.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from emberscale_api.pictures import GREY
from emberscale_api.readable import duration_text, rate_text
from emberscale_api.shape import JobProfile, JobShape
from emberscale_brain.history.changes import Codec
from emberscale_brain.model.predict import Coefficients, ModelConstants, features, shape_features, throughput
from emberscale_brain.planner.types import ThroughputFit
from real_profiles import measure, shapes_for
from references import fit_profiles
from reporting import Ratio, arguments, report, say

TRUTH = np.array([3.48, 2.36, 0.68, 2.45, 2.45, 0.0])
UNITS = ModelConstants(batch_size=1, dense_bytes=1, embedding_dimension=1, network_bytes_per_second=1)
NOISE = 0.05
TARGET = 0.02
SPLITS = 6


@dataclass(frozen=True)
class Measured:
    """The profiles of a tour, and the constants of its job."""

    profiles: tuple[JobProfile, ...]
    constants: ModelConstants


MEASURED: Codec[Measured] = Codec(Measured)


def shapes(count: int, random: np.random.Generator) -> list[JobShape]:
    """Draws shapes of up to 16 workers, 8 PS and 8 cores each."""
    return [
        JobShape(
            int(random.integers(1, 17)),
            int(random.integers(1, 9)),
            float(random.integers(1, 9)),
            float(random.integers(1, 9)),
            0,
            0,
        )
        for _ in range(count)
    ]


def profiles(measured: list[JobShape], repeats: int, outliers: float, random: np.random.Generator) -> list[JobProfile]:
    """Returns `repeats` profiles of each shape; the share `outliers` of them is 2 to 6 times too slow."""
    made: list[JobProfile] = []
    for shape in measured:
        for _ in range(repeats):
            seconds = float(shape_features(UNITS, shape) @ TRUTH) * math.exp(NOISE * random.standard_normal())
            if random.random() < outliers:
                seconds *= float(random.uniform(2, 6))
            made.append(JobProfile(30.0 * (len(made) + 1), shape, 1, seconds, shape.workers / seconds))
    return made


def held_out(measured: list[JobShape]) -> NDArray[np.float64]:
    """Returns the features of all shapes of the grid except the measured ones."""
    seen = {(s.workers, s.ps, s.worker_cpu, s.ps_cpu) for s in measured}
    axes = np.meshgrid(np.arange(1, 17), np.arange(1, 9), np.arange(1, 9), np.arange(1, 9), indexing="ij")
    rows = np.column_stack([axis.ravel() for axis in axes])
    new = np.array([tuple(row) not in seen for row in rows.tolist()])
    return features(UNITS, *rows[new].T)


def trial(seed: int, count: int, repeats: int, outliers: float) -> tuple[ThroughputFit, NDArray[np.float64], float]:
    """Returns a fit, its relative errors on held-out shapes, and the share of them within its 90% intervals."""
    random = np.random.default_rng(seed)
    measured = shapes(count, random)
    fit = fit_profiles(tuple(profiles(measured, repeats, outliers, random)), UNITS, now=1e9)
    if fit is None:
        raise RuntimeError("profiles without a fit")
    x = held_out(measured)
    model = Coefficients.of(fit)
    errors = model.iteration_seconds(x) / (x @ TRUTH) - 1
    covered = float(np.mean(np.abs(errors) <= 1.645 * model.uncertainty(x)))
    return fit, errors, covered


def draw(path: Path, seed: int) -> None:
    """Draws measured points and the fitted curve along each dimension, after DLRover-RM figure 11."""
    random = np.random.default_rng(seed)
    base = {"workers": 8, "ps": 4, "worker_cpu": 4.0, "ps_cpu": 4.0}
    ranges = {"workers": range(1, 17), "ps": range(1, 9), "worker_cpu": range(1, 9), "ps_cpu": range(1, 9)}
    fit, _, _ = trial(seed, 24, 20, 0.1)
    model = Coefficients.of(fit)
    figure = Figure(figsize=(16, 4), layout="constrained")
    axes = figure.subplots(1, 4)
    for axis, (name, values) in zip(axes, ranges.items(), strict=True):
        along = [JobShape(**{**base, name: value}, worker_memory=0, ps_memory=0) for value in values]  # type: ignore[arg-type]  # one of the four
        x = np.stack([shape_features(UNITS, shape) for shape in along])
        workers = np.array([shape.workers for shape in along])
        predicted, doubt = workers / model.iteration_seconds(x), model.uncertainty(x)
        noisy = workers / (x @ TRUTH) * np.exp(NOISE * random.standard_normal(len(along)))
        axis.fill_between(values, predicted * (1 - 1.645 * doubt), predicted * (1 + 1.645 * doubt), alpha=0.3)
        axis.plot(values, predicted, label="fit, 90% interval")
        axis.plot(values, noisy, "k.", label="measured, 5% noise")
        axis.set(xlabel=name, ylabel="samples/s (units of the paper)")
    axes[0].legend()
    figure.suptitle("Throughput model on the paper's coefficients; 24 random shapes, 10% outliers in the fit")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Runs the trials, and reports the errors against their targets."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=["synthetic", "real"], help="one half")
    parser.add_argument("--profiles", type=Path, metavar="FILE", help="keeps the real half's profiles, to go on from")
    parser.add_argument("--shapes", type=int, metavar="N", help="measures at most so many shapes in this call")
    options = parser.parse_args()
    ratios: dict[str, Ratio] = {}
    if options.only != "real":
        ratios |= synthetic(10 if options.quick else 100)
        if options.plot:
            draw(options.plot, 0)
    if options.only != "synthetic":
        measured = measured_tour(options.quick, options.profiles, options.shapes)
        if measured is None:
            say(f"not all shapes are measured yet: call it again with --profiles {options.profiles}")
        else:
            ratios |= real(measured.profiles, measured.constants, options.plot)
    report("throughput_fit", ratios, options.output)


def synthetic(trials: int) -> dict[str, Ratio]:
    """Measures the error on the paper's coefficients."""
    ratios = {}
    for count, repeats, outliers in ((12, 20, 0.0), (24, 20, 0.0), (24, 20, 0.1)):
        started = time.perf_counter()
        outcomes = [trial(seed, count, repeats, outliers) for seed in range(trials)]
        seconds = time.perf_counter() - started
        typical = [float(np.sqrt(np.mean(errors**2))) for _, errors, _ in outcomes]
        worst = [float(np.abs(errors).max()) for _, errors, _ in outcomes]
        covered = float(np.mean([share for _, _, share in outcomes]))
        within = float(np.mean([np.abs(errors).max() <= TARGET for _, errors, _ in outcomes]))
        setting = f"{count} shapes x {repeats} profiles" + (f", {outliers:.0%} outliers" if outliers else "")
        ratios[f"error (RMS over shapes), {setting}"] = Ratio([(error, 1.0) for error in typical], TARGET, "max")
        say(
            f"{setting}: RMS error median {np.median(typical):.3%}, largest {max(typical):.3%}; error at the worst of "
            f"8,192 shapes median {np.median(worst):.3%} (within 2% in {within:.0%} of trials); 90% intervals hold "
            f"{covered:.0%}; {duration_text(seconds / trials)} a trial"
        )
    return ratios


def measured_tour(quick: bool, file: Path | None, most: int | None) -> Measured | None:
    """Returns the tour's profiles, if possible from the file; None while shapes are missing.

    A call measures at most `most` shapes and adds them to the file, since a machine is rarely idle for long.
    """
    count, repeats, seconds, rows = (12, 4, 2.0, 100_000) if quick else (16, 6, 3.0, 200_000)
    tour = shapes_for(os.cpu_count() or 1, count, seed=1)
    known = MEASURED.from_text(file.read_bytes()) if file is not None and file.exists() else None
    there = {profile.shape for profile in known.profiles} if known is not None else set()
    missing = [shape for shape in tour if shape not in there][:most]
    if missing:
        profiles, constants = measure(missing, repeats, seconds, rows, hear=say)
        known = Measured((*(known.profiles if known is not None else ()), *profiles), constants)
        if file is not None:
            file.write_text(MEASURED.text(known))
    if known is None or not {profile.shape for profile in known.profiles} >= set(tour):
        return None
    return Measured(tuple(profile for profile in known.profiles if profile.shape in tour), known.constants)


def real(profiles: Sequence[JobProfile], constants: ModelConstants, picture: Path | None) -> dict[str, Ratio]:
    """Measures the error on shapes of a real run that were held out of the fit."""
    tour = list(dict.fromkeys(profile.shape for profile in profiles))
    measured = {
        shape: float(np.median([profile.throughput for profile in profiles if profile.shape == shape]))
        for shape in tour
    }
    predicted: dict[JobShape, list[float]] = {shape: [] for shape in tour}
    random = np.random.default_rng(1)
    errors = []
    for _ in range(SPLITS):
        held = {tour[int(index)] for index in random.permutation(len(tour))[: len(tour) // 3]}
        fit = fit_profiles(tuple(p for p in profiles if p.shape not in held), constants, now=time.time())
        if fit is None:
            raise RuntimeError("profiles without a fit")
        ratios = []
        for shape in held:
            predicted[shape].append(throughput(constants, fit, shape)[0])
            ratios.append(math.log1p(predicted[shape][-1]) - math.log1p(measured[shape]))
        errors.append(float(np.sqrt(np.mean(np.square(ratios)))))
    for shape, speed in measured.items():
        guesses = ", ".join(f"{guess:,.0f}" for guess in predicted[shape][:3]) or "never held out"
        say(f"  {shape.describe():66} {rate_text(speed):>18}, predicted {guesses}")
    if picture is not None:
        draw_real(picture.with_stem(f"{picture.stem}-real"), measured, predicted)
    label = f"RMSLE on held-out shapes of a real run ({len(tour)} shapes)"
    return {label: Ratio([(error, 1.0) for error in errors], 0.10, "max")}


def draw_real(path: Path, measured: Mapping[JobShape, float], predicted: Mapping[JobShape, Sequence[float]]) -> None:
    """Draws predicted against measured throughput of held-out shapes."""
    points = [(measured[shape], guess) for shape, guesses in predicted.items() for guess in guesses]
    figure = Figure(figsize=(5.5, 5), layout="constrained")
    axis = figure.subplots()
    axis.scatter(*zip(*points, strict=True), alpha=0.6)
    limit = max(max(point) for point in points)
    axis.plot([0, limit], [0, limit], color=GREY, linewidth=1)
    axis.set(xlabel="measured samples/s", ylabel="predicted samples/s", title="Shapes held out of the fit, real run")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
