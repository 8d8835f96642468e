"""The tokens that name a job."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale_api.rpc.token import JobClaims, claims_of, job_token

CLAIMS = JobClaims("f3a1", "ads")


@given(st.text(min_size=1), st.text(), st.text())
def test_a_token_says_whose_it_is_to_the_key_that_signed_it_and_to_no_other(key: str, uid: str, owner: str) -> None:
    claims = JobClaims(uid, owner)
    token = job_token(key, claims)
    assert token.isascii()
    assert claims_of(key, token) == claims
    assert claims_of(key + "x", token) is None


@given(st.text())
def test_any_other_text_claims_nothing(text: str) -> None:
    assert claims_of("key", text) is None
    assert claims_of("key", f"job.{text}") is None


@pytest.mark.parametrize("other", [JobClaims("f3a2", "ads"), JobClaims("f3a1", "search")])
def test_the_signature_of_one_job_is_of_no_use_to_another(other: JobClaims) -> None:
    mine, theirs = job_token("key", CLAIMS).split("."), job_token("key", other).split(".")
    assert claims_of("key", ".".join([*theirs[:2], mine[2]])) is None
