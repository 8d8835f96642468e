"""The tables that `emberscale data skew` prints."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table

from emberscale_api.job import memory_quantity
from emberscale_api.readable import bytes_text

if TYPE_CHECKING:
    from emberscale_trainer.hot.skew import SkewReport


def skew_tables(report: "SkewReport", gains: Sequence[float] | None) -> Iterator[RenderableType]:
    """Yields the findings in words and tables. `gains` are the largest speed-ups, one per budget."""
    measured = f"those of {report.held_out:,} others"
    if not report.apart:
        measured = "those of the same records, as there are too few to hold some back: others would be hot less often"
    counted = f"Counted {report.profiled:,} of {report.records:,} records ({report.share:.1%})"
    yield f"{counted}; shares and bytes are {measured}"
    if report.bad_records:
        yield f"{len(report.bad_records):,} malformed records were left out; the first: {report.bad_records[0]}"
    yield _accesses(report)
    yield _budgets(report, gains)
    rows = f"{report.row_bytes_per_sample:,.0f} bytes of rows a sample without hot rows"
    yield f"On the wire: {rows} (batches of {report.batch_size:,}, {report.workers} workers)"
    if report.budgets[0].exact is not None:
        yield _exactness(report)
    for point in report.budgets:
        if point.threshold * max(table.accesses for table in report.tables) <= 1:
            yield (
                f"From {memory_quantity(point.budget)} on, all rows that the sample saw are hot: a larger --sample "
                "finds more of them"
            )
            break
    if gains is None:
        yield "What this gains in time depends on the job: `--profile` takes what `emberscale profile` measured"


def _accesses(report: "SkewReport") -> Table:
    table = Table("table", title="Rows, and how many take 50% and 90% of the accesses", title_justify="left")
    for name in ("rows seen", "rows, at least", "bytes a row", "50% of accesses", "90%"):
        table.add_column(name, justify="right")
    for one in report.tables:
        table.add_row(
            one.name,
            f"{one.rows:,}",
            f"{one.estimated_rows:,}",
            f"{one.row_bytes:,}",
            f"{one.rows_for_half:,}",
            f"{one.rows_for_most:,}",
        )
    return table


def _budgets(report: "SkewReport", gains: Sequence[float] | None) -> Table:
    table = Table("budget", title="Hot rows", title_justify="left")
    names = ["threshold", "rows", "size", "accesses", "all-hot samples", "bytes, one copy", "a copy each"]
    for name in (*names, *(["speed, at most"] if gains else [])):
        table.add_column(name, justify="right")
    for number, point in enumerate(report.budgets):
        table.add_row(
            memory_quantity(point.budget),
            f"{point.threshold:.1e}" if point.rows else "none is",
            f"{point.rows:,}",
            bytes_text(point.bytes),
            f"{point.access_share:.1%}",
            f"{point.hot_share:.1%}",
            _ratio(point.traffic.shared, report.row_bytes_per_sample),
            _ratio(point.traffic.copies, report.row_bytes_per_sample),
            *([f"{gains[number]:.2f}x"] if gains else []),
        )
    return table


def _ratio(used: float, without: float) -> str:
    return f"{used / without:.2f}x" if without else "-"


def _exactness(report: "SkewReport") -> Table:
    table = Table(
        "budget",
        title="The sample against a full pass, and the best choice that the budget allows",
        title_justify="left",
    )
    for name in ("rows above it", "counted", "accesses", "at best", "all hot", "at best"):
        table.add_column(name, justify="right")
    for point in report.budgets:
        exact = point.exact
        if exact is not None:
            table.add_row(
                memory_quantity(point.budget),
                f"{point.estimated_rows:,.0f} ± {point.estimated_half_width:,.0f}",
                f"{exact.rows_at_threshold:,}",
                f"{exact.access_share:.2%}",
                f"{exact.best_access_share:.2%}",
                f"{exact.hot_share:.2%}",
                f"{exact.best_hot_share:.2%}",
            )
    return table
