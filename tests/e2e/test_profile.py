"""`emberscale profile`, on a whole job."""

import json
from pathlib import Path

import pytest
import yaml

from local_jobs import emberscale, manifest_of

# A whole job with real processes, which start torch half a dozen times.
pytestmark = pytest.mark.timeout(1200)


def test_a_job_is_profiled_and_leaves_nothing_but_the_profile(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest_of("profiled", dataset, {})))
    result = emberscale("profile", "job.yaml", "--samples", "20000", "--output", "json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    profile = json.loads(result.stdout)
    assert profile["samples"] >= 20_000
    assert (profile["workers"], profile["servers"]) == (2, 2)
    assert profile["share_of_roof"] > 0
    assert all(0 < profile["worker_stages"][stage] <= 1 for stage in ("read", "plan", "pull", "compute", "push"))
    assert sum(profile["server_stages"].values()) == pytest.approx(1)
    assert profile["ids_per_key"] > 1
    # a pull brings a row of 16 floats for each distinct key, and a push sends its gradient back
    rows = 26 * 16 * 4 / profile["ids_per_key"]
    assert profile["received_bytes_per_sample"] > rows
    assert profile["sent_bytes_per_sample"] > rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml", "profile.png"]
