"""Manifests with values that only a newer version knows."""

import json

import pytest

from emberscale_api.job import CleanPodPolicy, ManifestError, OptimizerType
from emberscale_api.job.newer import UnknownValue, parse_newer_manifest, with_values
from training_jobs import job_body


def test_the_default_stands_for_a_value_that_is_unknown_and_the_manifest_is_handed_on_as_it_is() -> None:
    body = job_body(
        optimizers={"sparse": {"type": "Shampoo"}}, runPolicy={"cleanPodPolicy": "Half"}, novelty={"level": 3}
    )
    job, unknown = parse_newer_manifest({**body, "metadata": {"name": "ctr"}})
    assert job.spec.run_policy.clean_pod_policy is CleanPodPolicy.RUNNING
    assert isinstance(job.spec.optimizers.sparse.type, OptimizerType)
    assert sorted(map(str, unknown)) == [
        "spec.optimizers.sparse.type ('Shampoo')",
        "spec.runPolicy.cleanPodPolicy ('Half')",
    ]
    spec = json.loads(with_values(job.to_json(), unknown))["spec"]
    assert spec["optimizers"]["sparse"]["type"] == "Shampoo"
    assert spec["runPolicy"]["cleanPodPolicy"] == "Half"
    assert spec["novelty"] == {"level": 3}


def test_what_is_wrong_besides_is_refused() -> None:
    body = job_body(runPolicy={"cleanPodPolicy": "Half", "backoffLimit": -1})
    with pytest.raises(ManifestError, match="backoffLimit"):
        parse_newer_manifest({**body, "metadata": {"name": "ctr"}})


def test_a_part_that_leaves_out_the_place_of_a_value_stays_without_it() -> None:
    unknown = [UnknownValue(("spec", "worker", "template", "tolerations", 0, "operator"), "Gt")]
    assert json.loads(with_values('{"spec": {"worker": {"template": {"tolerations": []}}}}', unknown)) == {
        "spec": {"worker": {"template": {"tolerations": []}}}
    }
