"""What the benchmark of parity compares."""

from collections import Counter
from pathlib import Path

import pytest

from emberscale_api.job import FaultToleranceStrategy, parse_manifest
from parity import WITH, WITHOUT, Setting, job_of, totals, turns, write_skewed
from parity_sweep import VARIATIONS


def setting_of(document: dict[str, object], skew: float | None) -> Setting:
    spec = parse_manifest(document).spec
    assert spec.ps.replicas is not None
    assert spec.worker.replicas is not None
    return Setting(
        spec.model.embeddings.dimension,
        spec.ps.replicas,
        spec.training.batch_size,
        spec.worker.replicas,
        spec.fault_tolerance.parity,
        skew,
    )


@pytest.mark.parametrize("name", VARIATIONS)
def test_the_jobs_of_a_pair_have_the_value_and_differ_in_parity_alone(name: str) -> None:
    variation = VARIATIONS[name]
    for value, setting in variation.settings(Setting(servers=6, batch_size=100)).items():
        coded, plain = (job_of(Path("data"), setting, contender) for contender in (WITH, WITHOUT))
        assert getattr(setting, variation.field) == value
        assert setting_of(coded, setting.skew) == setting
        strategies = [job["spec"].pop("faultTolerance")["strategy"] for job in (coded, plain)]
        assert strategies == [FaultToleranceStrategy.ERASURE_CODING, FaultToleranceStrategy.FULL_RECOVERY]
        assert coded == plain


def test_other_values_replace_the_usual_ones() -> None:
    assert VARIATIONS["servers"].settings(Setting(), (4, 7)) == {4: Setting(servers=4), 7: Setting(servers=7)}


def test_the_jobs_of_a_pair_follow_each_other_and_take_turns_in_being_first() -> None:
    settings = [Setting(), Setting(dimension=32)]
    order = list(turns(settings, 2))
    pairs = list(zip(order[::2], order[1::2], strict=True))
    assert [(first[:2], second[:2]) for first, second in pairs] == [
        ((pair, setting), (pair, setting)) for pair in range(2) for setting in settings
    ]
    for setting in settings:
        leaders = [first[2] for first, _ in pairs if first[1] == setting]
        assert Counter(leaders) == {WITH: 1, WITHOUT: 1}
    assert all({first[2], second[2]} == {WITH, WITHOUT} for first, second in pairs)


def test_a_ratio_is_of_all_roles_with_parity_over_without() -> None:
    runs = {WITHOUT: [{"ps": 1.0, "worker": 4.0}], WITH: [{"ps": 3.0, "worker": 5.0}]}
    assert totals(runs) == [(8.0, 5.0)]


def test_a_steeper_power_law_leaves_fewer_ids_in_otherwise_equal_records(tmp_path: Path) -> None:
    distinct, others = [], []
    for exponent in (0.0, 0.6, 0.9, 1.2, 1.5):
        folder = tmp_path / f"{exponent:g}"
        write_skewed(folder, 500, exponent)
        records = [line.split("\t") for line in (folder / "train-00000.tsv").read_text().splitlines()]
        assert {len(fields) for fields in records} == {1 + 13 + 26}
        others.append([fields[:14] for fields in records])
        distinct.append(sum(len(set(column)) for column in list(zip(*records, strict=True))[14:]))
    assert distinct == sorted(set(distinct), reverse=True)
    assert all(other == others[0] for other in others)
