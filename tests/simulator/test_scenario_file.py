import re
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from pydantic.alias_generators import to_camel

from emberscale_api.errors import InvalidError
from emberscale_api.job.run_policy import (
    DEFAULT_INTERVAL,
    CheckpointSpec,
    FaultToleranceSpec,
    FaultToleranceStrategy,
    RunPolicy,
    ScalingSpec,
)
from emberscale_api.job.training import ShardingSpec
from emberscale_brain.planner.types import ScalingOverheads
from emberscale_brain.preferences import PlannerPreferences
from emberscale_jobmaster import checkpointing
from emberscale_operator.machine.intent import grown_memory
from emberscale_operator.machine.restarts import Backoff
from emberscale_simulator.mechanics import ChangeMethod
from emberscale_simulator.recovery import Checkpoints
from emberscale_simulator.scenario import SchedulerKind, TraceWorkload
from emberscale_simulator.scenario_file import load_scenario
from emberscale_simulator.trace import COLUMNS, read_trace
from emberscale_simulator.workload import make_jobs

EXAMPLES = sorted((Path(__file__).parents[2] / "deploy/examples/scenarios").glob("*.yaml"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_loads_and_says_where_each_of_its_mechanics_comes_from(path: Path) -> None:
    scenario = load_scenario(path)
    assert scenario.name == path.stem
    for name, mechanics in scenario.mechanics.items():
        stated = {to_camel(field) for field in mechanics.model_fields_set} - {"sources"}
        assert not stated - mechanics.sources.keys(), name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_sources_that_an_example_names_are_there(path: Path) -> None:
    sources = "\n".join(text for one in load_scenario(path).mechanics.values() for text in one.sources.values())
    for file in re.findall(r"(?:benchmarks|docs)/\w+\.(?:py|md)", sources):
        assert (EXAMPLES[0].parents[3] / file).exists()
    for name in re.findall(r"emberscale_[\w.]*\w", sources):
        assert resolve_name(name)


def test_the_examples_say_the_same_of_what_is_built() -> None:
    assert len({load_scenario(path).mechanics["as-built"].model_dump_json() for path in EXAMPLES}) == 1


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_compares_our_planner_with_others_on_the_same_mechanics(path: Path) -> None:
    scenario = load_scenario(path)
    (ours,) = (spec.mechanics for spec in scenario.schedulers if spec.name == "emberscale")
    assert ours == "as-built"
    assert sum(spec.kind is not SchedulerKind.PLANNER and spec.mechanics == ours for spec in scenario.schedulers) >= 2


PRODUCT = {
    "change": ChangeMethod.LIVE,
    "resize": ScalingOverheads().resize_seconds,
    "checkpoint_interval": CheckpointSpec().interval,
    "checkpoint_slowdown": checkpointing.SLOWED,
    "detection": ShardingSpec().lease_timeout,
    "rollback": True,  # a lost PS rolls the job back to the last checkpoint
    "straggler_seconds": None,  # no load moves away from a slow PS
    "dynamic_sharding": True,
    "elastic": True,
    "sees_capacity": False,  # cluster.cpu and cluster.memory are settings
    "memory_growth": grown_memory(1 << 40) / (1 << 40),
    "max_memory_growth": ScalingSpec().max_memory_growth,
    "restart_backoff": Backoff().base,
    "restart_backoff_limit": Backoff().limit,
    "restart_backoff_reset": Backoff().reset_after,
    "backoff_limit": RunPolicy().backoff_limit,
}
MEASURED = {
    "worker_pause",
    "reshape",
    "move_bandwidth",
    "move_slowdown",
    "save_bandwidth",
    "load_bandwidth",
    "checkpoint_pause",
    "end_detection",
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_what_is_built_is_what_the_product_does(path: Path) -> None:
    built = load_scenario(path).mechanics["as-built"]
    assert set(PRODUCT) | MEASURED == set(type(built).model_fields) - {"sources"}
    assert {field: getattr(built, field) for field in PRODUCT} == PRODUCT
    assert Backoff().factor == 2  # as MemoryRestarts has it


def test_jobs_save_every_five_minutes_until_there_is_advice_as_in_the_product() -> None:
    assert FaultToleranceSpec().strategy is FaultToleranceStrategy.AUTO
    built = load_scenario(EXAMPLES[0]).mechanics["as-built"]
    assert Checkpoints(built).interval == DEFAULT_INTERVAL


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_our_planner_is_judged_with_the_preferences_that_it_comes_with(path: Path) -> None:
    assert all(spec.planner == PlannerPreferences() for spec in load_scenario(path).schedulers)


def test_each_seed_draws_jobs_of_its_own_from_a_trace() -> None:
    path = next(path for path in EXAMPLES if path.stem == "trace")
    scenario = load_scenario(path)
    first, again, judged = (make_jobs(scenario, seed, path.parent) for seed in (0, 0, scenario.seeds.judging.first))
    assert first == again
    assert len(first) == len(judged) == 24
    assert not {job.arrival for job in first} & {job.arrival for job in judged}
    assert not {job.metadata.total_samples for job in first} & {job.metadata.total_samples for job in judged}
    assert [job.metadata.name for job in first] != [job.metadata.name for job in judged]
    assert len({job.id for job in judged}) == 24


def test_without_variation_every_seed_has_the_trace_as_it_is() -> None:
    path = next(path for path in EXAMPLES if path.stem == "trace")
    scenario = load_scenario(path)
    assert isinstance(scenario.workload, TraceWorkload)
    scenario = scenario.model_copy(update={"workload": scenario.workload.model_copy(update={"variation": None})})
    assert [job.id for job in make_jobs(scenario, 0, path.parent)] == [
        row.job_id for row in read_trace(path.parent / "trace.csv", frozenset(scenario.models))
    ]
    assert make_jobs(scenario, 0, path.parent) == make_jobs(scenario, 1, path.parent)


def line_of(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("changes", "place", "problem"),
    [
        ({"horizon": "soon"}, "horizon", "'soon' is not a duration"),
        ({"color": "red"}, "color", "color: unknown field"),
        ({"name": "No Spaces"}, "name: ", "should match pattern"),
        ({"failures": {"dailyPodFailures": 3}}, "dailyPodFailures", "failures.dailyPodFailures"),
        ({"stragglers": {"slowest": 0.9, "fastest": 0.5}}, "stragglers", "slowest (0.9) must not be above fastest"),
        (
            {"mechanics": {"as-built": {"change": "Live", "sources": {"changes": "x"}}}},
            "as-built",
            "sources.changes: there is no such field",
        ),
        (
            {"seeds": {"tuning": {"first": 0, "count": 11}, "judging": {"first": 10, "count": 5}}},
            "seeds",
            "tuning and judging seeds must not overlap",
        ),
        ({"workload": {"kind": "Magic"}}, "workload", "'Rounds', 'Generated', 'Trace'"),
    ],
)
def test_a_bad_field_is_named_with_its_line(
    write_scenario: Callable[..., Path], changes: dict[str, Any], place: str, problem: str
) -> None:
    path = write_scenario(**changes)
    with pytest.raises(InvalidError) as raised:
        load_scenario(path)
    assert problem in str(raised.value)
    assert str(raised.value).startswith(f"{path}:{line_of(path, place)}:")


def test_a_missing_field_is_named(write_scenario: Callable[..., Path]) -> None:
    path = write_scenario()
    path.write_text(path.read_text().replace("steps: 20000", ""))
    with pytest.raises(InvalidError, match=r"workload\.steps: is required"):
        load_scenario(path)


def test_a_model_that_does_not_exist_is_named_with_those_that_do(write_scenario: Callable[..., Path]) -> None:
    path = write_scenario()
    path.write_text(path.read_text().replace("- dlrm", "- dlrn"))
    with pytest.raises(InvalidError, match="no model dlrn; there are dlrm"):
        load_scenario(path)


def test_mechanics_that_do_not_exist_are_named_with_those_that_do(write_scenario: Callable[..., Path]) -> None:
    path = write_scenario(schedulers=[{"name": "a", "kind": "Static", "mechanics": "as-dreamt"}])
    with pytest.raises(InvalidError, match="there are no mechanics 'as-dreamt'; there are as-built, restart"):
        load_scenario(path)


def test_what_is_no_yaml_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("name: x\ncluster: {nodes: [1\n")
    with pytest.raises(InvalidError, match=r"broken\.yaml:3:1: is not valid YAML"):
        load_scenario(path)
    with pytest.raises(InvalidError, match="cannot be read: No such file"):
        load_scenario(tmp_path / "absent.yaml")


HEADER = ",".join(COLUMNS)
GOOD = "a,ann,0,dlrm,1000,4,2,4,4,8,8"


def trace(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_trace_is_read_in_order_of_submission(tmp_path: Path) -> None:
    path = trace(tmp_path, HEADER, GOOD.replace("a,ann,0", "late,ann,9.5"), "", GOOD)
    rows = read_trace(path, frozenset({"dlrm"}))
    assert [row.job_id for row in rows] == ["a", "late"]
    assert rows[0].request.workers == 4
    assert rows[0].request.ps_memory == 8 << 30


def test_the_mark_that_spreadsheets_write_first_is_no_part_of_a_column(tmp_path: Path) -> None:
    path = trace(tmp_path, "\ufeff" + HEADER, GOOD)
    assert [row.job_id for row in read_trace(path, frozenset({"dlrm"}))] == ["a"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("a,ann,0,dlrm,1000,four,2,4,4,8,8", "column workers: 'four' is not a whole number"),
        ("a,ann,-1,dlrm,1000,4,2,4,4,8,8", "column submitted_seconds: -1 is not between 0"),
        ("a,ann,nan,dlrm,1000,4,2,4,4,8,8", "column submitted_seconds: nan is not between 0"),
        ("a,ann,0,dlrm,1000,4,2,inf,4,8,8", "column worker_cpu: inf is not between"),
        ("a,,0,dlrm,1000,4,2,4,4,8,8", "column owner: is empty"),
        ("a,ann,0,bert,1000,4,2,4,4,8,8", "column model: 'bert' is not one of the scenario's models: dlrm"),
        ("a,ann,0,dlrm,1000,4,2,4,4,8", "has 10 columns, the header has 11"),
    ],
)
def test_a_bad_row_is_named_with_line_and_column(tmp_path: Path, row: str, problem: str) -> None:
    path = trace(tmp_path, HEADER, GOOD.replace("a,", "b,", 1), row)
    with pytest.raises(InvalidError) as raised:
        read_trace(path, frozenset({"dlrm"}))
    assert str(raised.value).startswith(f"{path}:3: ")
    assert problem in str(raised.value)


def test_a_job_that_comes_twice_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"trace\.csv:3: column job_id: 'a' is on line 2 already"):
        read_trace(trace(tmp_path, HEADER, GOOD, GOOD), frozenset({"dlrm"}))


def test_a_header_without_a_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="missing column owner; unknown column Owner"):
        read_trace(trace(tmp_path, HEADER.replace("owner", "Owner"), GOOD), frozenset({"dlrm"}))
    with pytest.raises(InvalidError, match="holds no job"):
        read_trace(trace(tmp_path, HEADER), frozenset({"dlrm"}))
    (tmp_path / "trace.csv").write_text("")
    with pytest.raises(InvalidError, match="is empty"):
        read_trace(tmp_path / "trace.csv", frozenset({"dlrm"}))
