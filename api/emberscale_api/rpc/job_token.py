"""The token that one job's master shows to the brain: it names the job, and the brain's key signs it.

The operator and the brain share the key; whoever holds it may speak for all jobs. A job's token opens the calls that
are about this job, and no others. It needs no register: it is of no use once its job is gone.
"""

import base64
import hashlib
import hmac
import json
from dataclasses import dataclass

_PREFIX = "job."


@dataclass(frozen=True)
class JobClaims:
    """Who the holder of a token speaks for. `owner` is the namespace, whose quota the job is counted against."""

    job_uid: str
    owner: str


def job_token(key: str, claims: JobClaims) -> str:
    """The token of a job, in ASCII: `job.<claims in base64url>.<HMAC-SHA256 in hex>`."""
    document = json.dumps({"job_uid": claims.job_uid, "owner": claims.owner}, separators=(",", ":"))
    body = base64.urlsafe_b64encode(document.encode()).decode("ascii")
    return f"{_PREFIX}{body}.{_signature(key, body)}"


def claims_of(key: str, token: str) -> JobClaims | None:
    """The claims of a token that this key has signed; None for any other text. Compares in constant time."""
    if not token.startswith(_PREFIX):
        return None
    body, _, signature = token.removeprefix(_PREFIX).partition(".")
    if not hmac.compare_digest(signature.encode(), _signature(key, body).encode()):
        return None
    document = json.loads(base64.urlsafe_b64decode(body))
    return JobClaims(document["job_uid"], document["owner"])


def _signature(key: str, body: str) -> str:
    return hmac.new(key.encode(), body.encode(), hashlib.sha256).hexdigest()
