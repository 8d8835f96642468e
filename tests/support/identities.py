"""Identities of a job's processes on this machine."""

from emberscale_api.certificates import Certificates
from emberscale_api.environment import ProcessIdentity


def identity_of(
    role: str,
    master_address: str,
    *,
    job_name: str = "job",
    job_uid: str = "uid",
    incarnation: str = "1",
    token: str = "secret",
    certificates: Certificates | None = None,
) -> ProcessIdentity:
    """The first process of a role."""
    return ProcessIdentity(
        job_name=job_name,
        job_uid=job_uid,
        role=role,
        index=0,
        incarnation=incarnation,
        master_address=master_address,
        token=token,
        listen_host="127.0.0.1",
        advertised_host="127.0.0.1",
        socket_directory=None,
        cpu_cores=None,
        certificates=certificates,
    )
