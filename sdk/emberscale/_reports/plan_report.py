"""A plan and its reasons, as `emberscale explain-plan` says them."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from emberscale_api.readable import bytes_text, count_text, duration_text, rate_text, share_text
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc.codec import same_fields
from emberscale_api.shape import JobShape

_FRONT_ROWS = 10
_WORTH_SAYING = 0.05
"""The share of a fit, or the change of a throughput, below which people need not be told."""


def plan_report(explanation: pb.PlanExplanation, job: str) -> Iterator[str | Table]:
    """Yields the lines of the report, in rich's markup; `job` is the user's name for the job."""
    plan = explanation.plan
    yield f"[bold]{escape(job)}[/]: plan {plan.version} by {plan.planner or 'nobody yet'}, {plan.action}"
    if plan.HasField("shape"):
        yield f"  {same_fields(JobShape, plan.shape).describe()}"
    yield f"  {escape(plan.reason)}"
    if explanation.kept:
        yield f"[bold]since[/]     {escape(explanation.kept)}"
    if plan.stale_because:
        yield f"  [yellow]no newer plan:[/] {escape(plan.stale_because)}"
    if explanation.HasField("chosen"):
        yield f"[bold]expected[/]  {_expectation(explanation)}"
    if explanation.HasField("fit"):
        yield f"[bold]model[/]     {_fit(explanation.fit)}"
    if explanation.HasField("memory"):
        yield f"[bold]memory[/]    {_memory(explanation.memory)}"
    if plan.HasField("fault_tolerance"):
        yield f"[bold]recovery[/]  {escape(plan.fault_tolerance.reason)}"
        for way in plan.fault_tolerance.ways:
            lost = (
                f", loses the effect of {share_text(way.expected_pls)} of the samples"
                if way.expected_pls
                else ", loses nothing"
            )
            every = duration_text(way.checkpoint_interval)
            cost = share_text(way.overhead)
            yield f"  {escape(way.strategy)}: {cost} of the job's time, a checkpoint every {every}{lost}"
    for similar in explanation.similar:
        name = escape(similar.job_uid or "a job of another owner")
        shape = same_fields(JobShape, similar.shape).describe()
        yield f"[bold]like[/]      {name} ({similar.similarity:.0%}): {shape}"
    if explanation.front:
        yield ""
        yield _front(explanation)


def _expectation(explanation: pb.PlanExplanation) -> str:
    chosen = explanation.chosen
    price = f"for {chosen.cost_per_hour:.3g} an hour, in the currency of planner.cpuCoreHour"
    if explanation.HasField("present") and explanation.present.shape == chosen.shape:
        return f"{rate_text(chosen.throughput)} {price}, as it is"
    text = f"{rate_text(chosen.throughput)} +- {chosen.uncertainty:.0%} {price}"
    if not explanation.HasField("present"):
        return text
    gain, cost, saved = explanation.expected_gain, explanation.expected_cost, explanation.saved_seconds
    when = f"{duration_text(abs(saved))} {'sooner' if saved >= 0 else 'later'}"
    more = f"{rate_text(abs(gain))} {'more' if gain >= 0 else 'less'}"
    return (
        f"{text}; that is {more} and {cost:+.3g} an hour, the change included, which takes "
        f"{duration_text(explanation.overhead_seconds)}; done {when}"
    )


def _fit(fit: pb.FitSummary) -> str:
    if not fit.profiles:
        return "that of similar jobs: this one was not measured"
    text = (
        f"off by {fit.rmsle:.1%} (RMSLE) over {count_text(fit.profiles, 'profile')} of "
        f"{count_text(fit.distinct_shapes, 'shape')}; profiles scatter by {fit.noise:.1%}"
    )
    if fit.outliers:
        text += f", {count_text(fit.outliers, 'outlier')} set aside"
    if fit.prior_share >= _WORTH_SAYING:
        text += f"; {fit.prior_share:.0%} of it is the prior"
    if fit.overlap > 1:
        text += f"; the steps of a batch overlap (exponent {fit.overlap:g}): the longest counts most"
    return text


def _memory(memory: pb.MemoryOutlook) -> str:
    full = f"; full after {memory.oom_at_samples:,.0f} samples" if memory.oom_at_samples else ""
    return (
        f"the largest PS is expected to hold {bytes_text(memory.expected)} in the end "
        f"({bytes_text(memory.lower)} to {bytes_text(memory.upper)}; growth: {memory.law}){full}"
    )


def _front(explanation: pb.PlanExplanation) -> Table:
    """The Pareto front, thinned evenly to a few rows, with the present and the chosen shape."""
    runs = explanation.HasField("present")
    title = "The cheapest shape for each throughput: processes x cores, memory"
    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        caption_justify="left",
    )
    for name in ("workers", "PS", "cost/h"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("samples/s", *(["net"] if runs else []), "+-"):
        table.add_column(name, justify="right")
    table.add_column("")
    if runs:
        table.caption = "net: to the end of the job, with what the change takes; +-: of the change"
    step = -(-len(explanation.front) // _FRONT_ROWS)
    marks: dict[bytes, list[str]] = {}
    points = {point.shape.SerializeToString(deterministic=True): point for point in explanation.front[::step]}
    for name, mark in (("present", "now"), ("chosen", "chosen")):
        if explanation.HasField(name):  # type: ignore[arg-type]  # the stubs want a literal
            point = getattr(explanation, name)
            key = point.shape.SerializeToString(deterministic=True)
            points.setdefault(key, point)
            marks.setdefault(key, []).append(mark)
    for key, point in sorted(points.items(), key=lambda item: item[1].cost_per_hour):
        mark = ", ".join(marks.get(key, []))
        predicted = (f"{speed:,.0f}" for speed in (point.throughput, point.net)[: 1 + runs])
        cells = (f"{point.cost_per_hour:.3g}", *predicted, f"{point.uncertainty:.0%}", mark)
        table.add_row(*_roles(point.shape), *cells, style="bold" if mark else None)
    return table


def _roles(shape: pb.Shape) -> tuple[str, str]:
    """Workers and PS in a column each."""
    return (
        f"{shape.workers} x {shape.worker_cpu:g}, {bytes_text(shape.worker_memory)}",
        f"{shape.ps} x {shape.ps_cpu:g}, {bytes_text(shape.ps_memory)}",
    )
