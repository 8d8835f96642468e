"""A run's summary as a table."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from emberscale._run.hot import hot_in_words
from emberscale._run.record import RunPaths, RunStatus
from emberscale._run.summary import Summary
from emberscale_api.readable import bytes_text, count_text, duration_text, rate_text

_COLOURS = {str(RunStatus.COMPLETE): "bold green", str(RunStatus.FAILED): "bold red"}


def summary_table(summary: Summary, root: Path) -> RenderableType:
    """Shows the results, the use of time and memory, and the paths of the files."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(summary):
        table.add_row(name, value if isinstance(value, str) else Columns(value, padding=(0, 3, 0, 0)))
    paths = RunPaths(root)
    files = [paths.summary, paths.metrics, paths.picture, paths.logs, paths.model]
    table.add_row("files", "\n".join(str(path) for path in files if path.exists()))
    title = Text.assemble((summary.name, "bold"), " is ", (summary.phase, _COLOURS.get(summary.phase, "bold yellow")))
    if summary.message:
        title.append(f": {summary.message}")
    return Group(Text(), title, Text(), table)


def _measured(values: Mapping[str, float | None], where: str = "") -> list[tuple[str, str | tuple[str, ...]]]:
    """Returns one line for the known values, titled by the first of them."""
    known = [(name, f"{value:.4f}") for name, value in values.items() if value is not None]
    if not known:
        return []
    (title, first), *others = known
    return [(title, "   ".join([first, *(f"{name} {value}" for name, value in others), *([where] if where else [])]))]


def _costs(costs: Sequence[Mapping[str, Any]], restore_seconds: float | None) -> tuple[str, ...]:
    """What checkpoints cost together, and what a restore from the last one reads."""
    written, held = (sum(cost[name] for cost in costs) for name in ("written_bytes", "held_seconds"))
    seconds = sum(cost["seconds"] for cost in costs)
    took = "" if restore_seconds is None else f", {duration_text(restore_seconds)} at the rate of these writes"
    return (
        f"{len(costs)} in {duration_text(seconds)}",
        f"{bytes_text(written)} written",
        f"pushes held {duration_text(held)}",
        f"a restore reads {bytes_text(costs[-1]['bytes'])}{took}",
    )


def _lines(summary: Summary) -> list[tuple[str, str | tuple[str, ...]]]:
    """Names and values; a value of several parts is not broken within one."""
    is_part = summary.expected_samples not in (0, summary.samples)  # 0: the run was stopped before its master told
    share = f" of {summary.expected_samples:,}" if is_part else ""
    lines: list[tuple[str, str | tuple[str, ...]]] = [("samples", f"{summary.samples:,}{share}")]
    if summary.origin is not None:
        lines.append(("started from", f"{summary.origin['checkpoint']}, {summary.origin['samples']:,} samples"))
    if summary.phase != RunStatus.COMPLETE and summary.checkpoint_samples is not None:
        kept = f"{summary.checkpoint_samples:,} in checkpoint {summary.checkpoint}, from which --resume continues"
        lines.append(("saved", kept))
    where = "on held-out data" if summary.measured_on == "evaluation" else "on the latest training data"
    lines += _measured({"AUC": summary.auc, "log loss": summary.logloss}, where)
    lines += _measured({"normalised entropy": summary.normalized_entropy, "calibration": summary.calibration})
    if len(summary.evaluations) > 1:
        by_epoch = (one["auc"] for one in summary.evaluations)
        shown = (f"{auc:.4f}" if auc is not None and isfinite(auc) else "unknown" for auc in by_epoch)
        lines.append(("AUC by epoch", "   ".join(shown)))
    lines.append(("speed", f"{rate_text(summary.samples_per_second)} over {duration_text(summary.training_seconds)}"))
    lines.append(("wall time", duration_text(summary.wall_seconds)))
    if any(summary.stages.values()):
        spent = {stage: duration_text(seconds) for stage, seconds in summary.stages.items()}
        waited = f"{spent['wait_read']} for batches, {spent['wait_pull']} for rows, {spent['wait']} otherwise"
        lines.append(("training", (f"computed {spent['compute']}", f"waited {waited}")))
        lines.append(("beside it", "   ".join(f"{stage} {spent[stage]}" for stage in ("read", "plan", "pull", "push"))))
    if summary.traffic["single_bytes"]:
        length = summary.traffic["round_batches"] / summary.traffic["rounds"]
        ratio = summary.traffic["round_bytes"] / summary.traffic["single_bytes"]
        lines.append(("rounds", f"{length:.1f} batches each, {ratio:.2f}x of the bytes"))
    if summary.hot_embeddings:
        lines.append(("hot embeddings", "\n".join(hot_in_words(summary.hot_embeddings))))
    if summary.rows:
        lines.append(("rows", f"{sum(summary.rows.values()):,} in {len(summary.rows)} tables"))
    if summary.admission:
        admitted, refused, evicted = (
            sum(counts[name] for counts in summary.admission.values()) for name in ("admitted", "refused", "evicted")
        )
        only_counted = f"{count_text(refused, 'push', 'pushes')} only counted"
        lines.append(("ids", (f"{admitted:,} admitted", f"{evicted:,} evicted", only_counted)))
    if summary.peak_memory_bytes:
        peaks = tuple(f"{name} {bytes_text(count)}" for name, count in summary.peak_memory_bytes.items())
        lines.append(("peak memory", peaks))
    troubles = [count_text(count, f"{role} restart") for role, count in summary.restarts.items() if count]
    if summary.recoveries:
        troubles.append(f"{count_text(summary.recoveries, 'recovery', 'recoveries')} from a checkpoint")
    if summary.forgotten:
        count = count_text(len(summary.forgotten), "recovery", "recoveries")
        samples = sum(share["samples"] for share in summary.forgotten)
        lost = f"{samples:,} samples forgotten on the rows of lost servers, portion of lost samples {summary.pls:.4f}"
        lines.append(("forgotten", f"{lost}, in {count}"))
    if summary.rebuilds:
        troubles.append(f"{count_text(summary.rebuilds, 'parameter server')} rebuilt from parity")
    if summary.bad_records:
        troubles.append(count_text(summary.bad_records, "malformed record"))
    if summary.truncated_records:
        lines.append(("cut to maxLength", f"lists of {count_text(summary.truncated_records, 'record')}"))
    counted = [", ".join(troubles)] if troubles else []
    lines.append(("troubles", "\n".join([*counted, *summary.warnings]) or "none"))
    if summary.plan.get("version"):
        changes = count_text(summary.plan["scalings"], "change")
        lines.append(("plan", f"{summary.plan['message']}   ({changes} of shape)"))
    lines.append(("checkpoint", summary.checkpoint or "none"))
    if summary.checkpoints:
        lines.append(("checkpoints", _costs(summary.checkpoints, summary.restore_seconds)))
    return lines
