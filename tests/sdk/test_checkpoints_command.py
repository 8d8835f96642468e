"""`emberscale checkpoints`, on folders that a job left."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from emberscale._cli import app
from emberscale._run.checkpoints import SavedCheckpoint, SavedCheckpoints
from emberscale_api.checkpoint import CheckpointManifest, EpochApplied
from emberscale_api.readable import bytes_text
from master_stand_in import checkpoint_manifest
from trained_run import KEYS, TrainedRun


@pytest.fixture
def run(tmp_path: Path) -> TrainedRun:
    run = TrainedRun(tmp_path / "run")
    for cut in (1, 2, 3):
        run.checkpoint(cut)
    return run


def checkpoints(*arguments: object, columns: int = 300) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["checkpoints", *map(str, arguments)], env={"COLUMNS": str(columns)})
    return result.exit_code, result.stdout, result.stderr


def listed(place: object) -> list[dict[str, Any]]:
    code, printed, _ = checkpoints("list", place, "--output", "json")
    assert code == 0
    found: list[dict[str, Any]] = json.loads(printed)[0]["checkpoints"]
    return found


def folder_of(run: TrainedRun, cut: int) -> Path:
    return run.root / "checkpoints" / f"{cut:08}"


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def refuse_access(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses to list a folder, and to look at what is in it, as to a user without permission."""

    def refused(call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(path: Any, *arguments: Any, **options: Any) -> Any:
            if folder in (Path(path).parent, Path(path) if call is scandir else None):
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *arguments, **options)

        return checked

    stat, scandir = os.stat, os.scandir
    monkeypatch.setattr(os, "scandir", refused(scandir))
    monkeypatch.setattr(os, "stat", refused(stat))


class TestList:
    def test_the_newest_come_first_with_what_is_wrong_with_each(self, run: TrainedRun) -> None:
        (folder_of(run, 2) / "manifest.json").unlink()
        rows = next(folder_of(run, 1).rglob("table-*.rows"))
        rows.write_bytes(rows.read_bytes()[:-1])
        newest, incomplete, short = listed(run.root)
        assert [newest["id"], incomplete["id"], short["id"]] == ["00000003", "00000002", "00000001"]
        assert newest["problem"] == ""
        assert incomplete["problem"] == "has no manifest: it is being written, or was given up"
        size = rows.stat().st_size
        assert short["problem"] == f"{rows}: has {size} bytes, and should have {size + 1}"
        assert f"00000002: {incomplete['problem']}" in checkpoints("list", run.root)[1]

    def test_a_checkpoint_that_this_user_may_not_read_is_not_called_incomplete(
        self, run: TrainedRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = folder_of(run, 2)
        refuse_access(folder, monkeypatch)
        assert listed(run.root)[1]["problem"] == f"{folder}: cannot be read: Permission denied"
        assert checkpoints("verify", run.root)[0] == 1

    def test_a_file_that_this_user_may_not_reach_is_not_called_missing(
        self, run: TrainedRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = folder_of(run, 2) / "ps-0"
        refuse_access(server, monkeypatch)
        problem = listed(run.root)[1]["problem"]
        assert problem.startswith(f"{server}/")
        assert problem.endswith(": cannot be read: Permission denied")

    @pytest.mark.parametrize("name", ["00000004", "00000002/ps-0"])
    def test_a_file_in_the_place_of_a_folder_hides_no_checkpoint(self, run: TrainedRun, name: str) -> None:
        place = run.root / "checkpoints" / name
        if place.exists():
            shutil.rmtree(place)
        place.touch()
        wrong = [one["id"] for one in listed(run.root) if one["problem"]]
        assert wrong == [Path(name).parts[0]]

    def test_a_narrow_terminal_wraps_the_lines_of_one_of_80_columns(self, run: TrainedRun) -> None:
        assert checkpoints("list", run.root, columns=60) == checkpoints("list", run.root, columns=80)

    def test_a_terminal_of_80_columns_shows_each_checkpoint_and_what_is_wrong_with_it(self, run: TrainedRun) -> None:
        (folder_of(run, 2) / "manifest.json").unlink()
        shown = checkpoints("list", run.root, columns=80)[1]
        assert "\N{HORIZONTAL ELLIPSIS}" not in shown
        assert [line.split()[0] for line in shown.splitlines() if line.startswith("0000")] == [
            *("00000003", "00000002", "00000001"),
            "00000002:",
        ]
        newest = listed(run.root)[0]
        assert f"{newest['samples']:,}" in shown
        assert bytes_text(newest["restore_bytes"]) in shown

    def test_a_uri_of_checkpoints_serves_as_well_as_the_run(self, run: TrainedRun) -> None:
        assert listed(f"file://{run.root}/checkpoints") == listed(run.root)

    def test_one_checkpoint_is_a_place(self, run: TrainedRun) -> None:
        assert [one["id"] for one in listed(folder_of(run, 2))] == ["00000002"]

    def test_one_that_a_job_removes_meanwhile_hides_no_other(
        self, run: TrainedRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = CheckpointManifest.from_json
        oldest = folder_of(run, 1)

        def removing(text: str | bytes, name: str) -> CheckpointManifest:
            shutil.rmtree(oldest, ignore_errors=True)
            return read(text, name)

        monkeypatch.setattr(CheckpointManifest, "from_json", removing)
        assert [(one["id"], bool(one["problem"])) for one in listed(run.root)] == [
            ("00000003", False),
            ("00000002", False),
            ("00000001", True),
        ]

    @pytest.mark.parametrize(
        ("place", "told"),
        [
            ("nowhere", "does not exist"),
            ("run/logs", "holds no checkpoints"),
            ("run/checkpoints/00000009", "is no checkpoint"),
        ],
    )
    def test_a_place_without_checkpoints_is_bad_input(self, run: TrainedRun, place: str, told: str) -> None:
        (run.root / "logs").mkdir(exist_ok=True)
        code, _, errors = checkpoints("list", run.root.parent / place)
        assert code == 2
        assert f"{place}: {told}" in errors


class TestShow:
    def test_rows_are_counted_over_all_servers(self, run: TrainedRun) -> None:
        shown = json.loads(checkpoints("show", run.root, "--output", "json")[1])
        assert shown["id"] == "00000003"
        assert [(table["name"], table["rows"]) for table in shown["tables"]][:2] == [
            ("user", len(KEYS)),
            ("item/id", 0),
        ]
        assert shown["tables"][-1]["name"] == "(dense)"
        assert f"{len(KEYS):,}" in checkpoints("show", run.root)[1]

    def test_sizes_are_those_of_the_list(self, run: TrainedRun) -> None:
        newest, shown = listed(run.root)[0], checkpoints("show", run.root)[1]
        facts = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in shown.splitlines() if "│" in line}
        assert facts["size"] == f"{bytes_text(newest['bytes'])}, its own files and the manifest"
        assert facts["a restore reads"] == bytes_text(newest["restore_bytes"])

    def test_the_newest_that_can_be_restored_is_shown(self, run: TrainedRun) -> None:
        (folder_of(run, 3) / "manifest.json").write_text("{}")
        assert json.loads(checkpoints("show", run.root, "--output", "json")[1])["id"] == "00000002"

    def test_where_nothing_can_be_restored_each_reason_is_a_line(self, run: TrainedRun) -> None:
        for cut in (1, 2, 3):
            (folder_of(run, cut) / "manifest.json").write_text("{}")
        code, _, errors = checkpoints("show", run.root)
        assert code == 2
        assert [f"{folder_of(run, cut)}/manifest.json" in errors for cut in (1, 2, 3)] == [True] * 3

    def test_one_that_cannot_be_restored_is_a_line_with_the_one_to_take_instead(self, run: TrainedRun) -> None:
        rows = next(folder_of(run, 2).rglob("table-*.rows"))
        rows.unlink()
        expected = f"{rows}: is missing; 00000001 can be restored instead"
        code, _, errors = checkpoints("show", folder_of(run, 2))
        assert code == 2
        assert errors.splitlines() == [f"error: PLACE: {folder_of(run, 2)}: {expected}"]
        assert f"00000002: {expected}" in checkpoints("list", folder_of(run, 2))[1]

    def test_one_whose_content_was_altered_is_a_line_with_the_one_to_take_instead(self, run: TrainedRun) -> None:
        altered = folder_of(run, 3) / "ps-0" / "partition.json"
        flip_a_bit(altered)
        expected = f"error: {altered} was altered: its checksum does not match; 00000002 can be restored instead"
        for arguments in (("show", run.root), ("diff", run.root, folder_of(run, 1))):
            code, _, errors = checkpoints(*arguments)
            assert code == 2
            assert errors.splitlines() == [expected]


class TestVerify:
    def test_sound_checkpoints_pass(self, run: TrainedRun) -> None:
        code, printed, _ = checkpoints("verify", run.root)
        assert code == 0
        assert printed.count(": sound, ") == 3

    def test_a_flipped_bit_anywhere_is_found_and_named(self, run: TrainedRun) -> None:
        flipped = [file for file in folder_of(run, 2).rglob("ps-*/*") if file.stat().st_size]
        for file in flipped:
            flip_a_bit(file)
        assert not any(one["problem"] for one in listed(run.root))
        code, printed, _ = checkpoints("verify", run.root, "--output", "json")
        assert code == 1
        problems = {verdict["id"]: verdict["problems"] for verdict in json.loads(printed)}
        assert problems["00000001"] == problems["00000003"] == []
        assert sorted(problems["00000002"]) == sorted(
            f"{file} was altered: its checksum does not match" for file in flipped
        )

    def test_one_that_was_never_completed_is_told_and_is_no_failure(self, run: TrainedRun) -> None:
        (folder_of(run, 3) / "manifest.json").unlink()
        code, printed, _ = checkpoints("verify", run.root)
        assert code == 0
        assert "00000003: has no manifest" in printed

    def test_one_that_a_job_removes_meanwhile_is_no_failure(
        self, run: TrainedRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        verify = SavedCheckpoints.verify

        def removing(folder: SavedCheckpoints, manifest: CheckpointManifest, read: Callable[[int], None]) -> list[str]:
            if manifest.id == "00000001":
                folder.remove(manifest.id)
            return verify(folder, manifest, read)

        monkeypatch.setattr(SavedCheckpoints, "verify", removing)
        code, printed, _ = checkpoints("verify", run.root)
        assert code == 0
        assert printed.count(": sound, ") == 2
        assert printed.endswith("00000001: was removed meanwhile\n")


class TestDiff:
    def test_other_fields_of_the_manifest_and_other_rows_are_named(self, run: TrainedRun, tmp_path: Path) -> None:
        other = TrainedRun(tmp_path / "other", architecture="DLRM")
        other.checkpoint(1)
        code, printed, _ = checkpoints("diff", run.root, other.root, "--output", "json")
        assert code == 0
        document = json.loads(printed)
        assert document["checkpoints"] == ["00000003", "00000001"]
        assert document["manifest"]["spec.model.architecture"] == ["DCNv2", "DLRM"]
        assert document["figures"]["rows of user"] == [len(KEYS)] * 2
        assert "spec.model.architecture" in checkpoints("diff", run.root, other.root)[1]


class TestQuantised:
    @pytest.fixture
    def quantised(self, run: TrainedRun) -> TrainedRun:
        run.checkpoint(4, weight_bits=4)
        return run

    def test_the_bits_of_weights_are_listed(self, quantised: TrainedRun) -> None:
        assert [one["weight_bits"] for one in listed(quantised.root)] == [4, 0, 0, 0]
        shown = checkpoints("list", quantised.root)[1]
        assert "4 bits" in shown
        assert "float32" in shown

    def test_what_each_table_takes_is_shown_beside_what_it_would_take_exactly(self, quantised: TrainedRun) -> None:
        shown = json.loads(checkpoints("show", quantised.root, "--output", "json")[1])
        users, *_, dense = shown["tables"]
        assert users["weight_bits"] == 4
        assert users["exact_bytes"] == 32 * len(KEYS)  # key, 4 weights, an accumulator, pushes
        files = (quantised.root / "checkpoints" / "00000004").glob("ps-*/table-0-*.b4")
        assert users["bytes"] == sum(file.stat().st_size for file in files) < users["exact_bytes"]
        assert dense["weight_bits"] == 0
        assert "instead of" in checkpoints("show", quantised.root)[1]

    def test_every_byte_is_verified(self, quantised: TrainedRun) -> None:
        code, printed, _ = checkpoints("verify", quantised.root)
        assert code == 0
        assert "weights of 4 bits" in printed
        flip_a_bit(next(folder_of(quantised, 4).rglob("*.b4")))
        assert checkpoints("verify", quantised.root)[0] == 1

    def test_the_encoding_is_among_the_differences(self, quantised: TrainedRun) -> None:
        printed = checkpoints("diff", folder_of(quantised, 3), folder_of(quantised, 4), "--output", "json")[1]
        assert json.loads(printed)["figures"]["weights"] == ["float32", "4 bits"]


class TestPrune:
    def test_nothing_is_removed_before_it_is_confirmed(self, run: TrainedRun) -> None:
        code, printed, _ = checkpoints("prune", run.root, "--keep", 1)
        assert code == 0
        assert "00000001: would be removed" in printed
        assert len(listed(run.root)) == 3

    def test_the_newest_that_are_whole_stay_and_so_does_what_is_being_written(self, run: TrainedRun) -> None:
        run.checkpoint(4)
        (run.checkpoint(5) / "manifest.json").unlink()
        flip_a_bit(next(folder_of(run, 4).rglob("table-*.rows")))
        (folder_of(run, 2) / "manifest.json").unlink()
        code, _, errors = checkpoints("prune", run.root, "--keep", 1, "--yes")
        assert code == 0
        assert "00000004" in errors
        assert [one["id"] for one in listed(run.root)] == ["00000005", "00000004", "00000003"]

    def test_a_checkpoint_that_begins_meanwhile_is_left_alone(
        self, run: TrainedRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = SavedCheckpoints.entries

        def begun_after(folder: SavedCheckpoints) -> tuple[SavedCheckpoint, ...]:
            entries = found(folder)
            folder_of(run, 4).mkdir(exist_ok=True)
            return entries

        monkeypatch.setattr(SavedCheckpoints, "entries", begun_after)
        code, printed, _ = checkpoints("prune", run.root, "--keep", 2, "--yes")
        assert code == 0
        assert "00000001: removed" in printed
        assert [one["id"] for one in listed(run.root)] == ["00000004", "00000003", "00000002"]

    def test_where_nothing_is_whole_nothing_is_removed(self, run: TrainedRun) -> None:
        for cut in (1, 2, 3):
            flip_a_bit(next(folder_of(run, cut).rglob("table-*.rows")))
        assert checkpoints("prune", run.root, "--yes")[0] == 2
        assert len(listed(run.root)) == 3

    def test_a_single_checkpoint_is_no_place_to_prune(self, run: TrainedRun) -> None:
        code, _, errors = checkpoints("prune", folder_of(run, 1), "--yes")
        assert code == 2
        assert "single checkpoint" in errors
        assert len(listed(run.root)) == 3


@pytest.mark.parametrize(
    ("ranges", "samples"), [([], 0), ([(0, 2)], 128), ([(0, 15)], 960), ([(0, 16)], 1000), ([(15, 16)], 40)]
)
def test_the_last_batch_of_an_epoch_may_be_short(ranges: list[tuple[int, int]], samples: int) -> None:
    applied = (EpochApplied(epoch=0, ranges=tuple(ranges)),)
    manifest = checkpoint_manifest(batch_size=64, training_records=1000, applied=applied)
    assert manifest.applied_samples == samples


class TestChains:
    """Checkpoints that build on earlier ones."""

    @pytest.fixture
    def chain(self, tmp_path: Path) -> TrainedRun:
        run = TrainedRun(tmp_path / "run")
        run.chain(3)
        run.checkpoint(4)
        return run

    def test_increments_are_listed_below_what_they_build_on(self, chain: TrainedRun) -> None:
        shown = re.findall(r"^(?:[├└] )?\d{8}", checkpoints("list", chain.root)[1], re.MULTILINE)
        assert shown == ["00000004", "00000001", "├ 00000002", "└ 00000003"]
        full, third, second, first = listed(chain.root)
        assert third["builds_on"] == ["00000001", "00000002"]
        assert first["builds_on"] == full["builds_on"] == []
        assert second["bytes"] < first["bytes"] / 4
        assert third["restore_bytes"] > first["restore_bytes"]

    def test_the_rows_of_a_chain_are_counted_once(self, chain: TrainedRun) -> None:
        shown = json.loads(checkpoints("show", folder_of(chain, 3), "--output", "json")[1])
        assert len(KEYS) - 10 <= shown["tables"][0]["rows"] < len(KEYS)
        assert "00000001, 00000002" in checkpoints("show", folder_of(chain, 3))[1]

    def test_damage_to_a_base_damages_all_that_build_on_it_and_another_is_named(self, chain: TrainedRun) -> None:
        rows = next(folder_of(chain, 1).rglob("table-0-0.rows"))
        flip_a_bit(rows)
        code, printed, _ = checkpoints("verify", chain.root)
        assert code == 1
        told = {line.split(": ")[1]: line for line in printed.splitlines()}
        for number in (1, 2, 3):
            line = told[f"{number:08}"]
            assert f"{rows} was altered" in line
            assert line.endswith("00000004 is sound")
        rows.unlink()
        shown = checkpoints("list", chain.root)[1]
        assert shown.count(f"{rows}: is missing; 00000004 can be restored instead") == 3

    def test_pruning_never_breaks_a_chain(self, tmp_path: Path) -> None:
        run = TrainedRun(tmp_path / "run")
        run.chain(4, one_shot=True)
        code, printed, _ = checkpoints("prune", run.root, "--keep", 1, "--yes")
        assert code == 0
        assert "00000004: verified, stays; so does 00000001, on which it builds" in printed
        assert [one["id"] for one in listed(run.root)] == ["00000004", "00000001"]
        assert checkpoints("verify", run.root)[0] == 0

    def test_pruning_leaves_what_a_damaged_newest_checkpoint_builds_on(self, tmp_path: Path) -> None:
        """A job that does not know of the damage yet may still build on the same base."""
        run = TrainedRun(tmp_path / "run")
        run.chain(2)
        folder_of(run, 2).rename(folder_of(run, 3))
        file = folder_of(run, 3) / "manifest.json"
        renamed = CheckpointManifest.from_json(file.read_bytes(), "m").model_copy(update={"id": "00000003"})
        file.write_text(renamed.to_json())
        run.checkpoint(2)
        flip_a_bit(next(folder_of(run, 3).rglob("table-*.rows")))
        code, printed, _ = checkpoints("prune", run.root, "--keep", 1, "--yes")
        assert code == 0
        assert "00000002: verified, stays; so does 00000001, on which it builds" in printed
        assert [one["id"] for one in listed(run.root)] == ["00000003", "00000002", "00000001"]

    def test_chains_that_end_alike_hold_the_same_rows(self, tmp_path: Path) -> None:
        consecutive, one_shot = TrainedRun(tmp_path / "a"), TrainedRun(tmp_path / "b")
        consecutive.chain(4)
        one_shot.chain(4, one_shot=True)
        figures = json.loads(checkpoints("diff", consecutive.root, one_shot.root, "--output", "json")[1])["figures"]
        assert len({*figures["rows of user"]}) == 1
