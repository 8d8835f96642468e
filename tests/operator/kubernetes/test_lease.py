"""Who owns the operator's lease, so that it goes with the installation."""

import base64
import json
from pathlib import Path

import pytest

from emberscale_operator.kubernetes.lease import account_owner


def write_token(path: Path, claims: object) -> Path:
    parts = ({"alg": "RS256"}, claims)
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
    path.write_text(".".join([*encoded, "signature"]))
    return path


def test_the_lease_belongs_to_the_account_that_the_token_names(tmp_path: Path) -> None:
    claims = {"kubernetes.io": {"namespace": "system", "serviceaccount": {"name": "operator", "uid": "1234"}}}
    owner = account_owner(write_token(tmp_path / "token", claims))
    assert owner == {"apiVersion": "v1", "kind": "ServiceAccount", "name": "operator", "uid": "1234"}


@pytest.mark.parametrize("claims", [{}, {"kubernetes.io": {}}, ["none"]])
def test_a_token_that_names_no_account_leaves_it_without_an_owner(tmp_path: Path, claims: object) -> None:
    assert account_owner(write_token(tmp_path / "token", claims)) is None


def test_outside_of_a_pod_there_is_no_owner(tmp_path: Path) -> None:
    assert account_owner(tmp_path / "token") is None
