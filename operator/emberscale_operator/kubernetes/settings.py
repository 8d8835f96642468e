"""The environment of the operator; `emberscale_operator.__main__` documents each variable."""

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from emberscale_api.certificates import client_context
from emberscale_api.environment import BRAIN_CA, FLASH_REDIS_URL
from emberscale_api.errors import InvalidError
from emberscale_api.job import parse_duration

_PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


@dataclass(frozen=True)
class Settings:
    """The operator's settings. `watch_namespaces` is empty for the whole cluster; times are in seconds.

    `brain_authority`, in PEM, speaks for a brain that serves TLS. `flash_redis_url` is empty where jobs take no flash
    checkpoints.
    """

    image: str
    redis_url: str
    namespace: str
    identity: str
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    brain_address: str = ""
    brain_token: str = ""
    brain_authority: str = ""
    flash_redis_url: str = ""
    job_tls: bool = False
    watch_namespaces: tuple[str, ...] = ()
    lease_name: str = "emberscale-operator"
    cluster_domain: str = "cluster.local"
    metrics_port: int = 9090
    health_port: int = 8080
    resync: float = 30.0
    log_level: int = logging.INFO

    @property
    def installation(self) -> str:
        """Tells this operator from others of the cluster."""
        return f"{self.namespace}/{self.lease_name}"


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings that the environment gives. Raises InvalidError."""

    def required(name: str) -> str:
        value = environment.get(name, "")
        if not value:
            raise InvalidError(f"{name} is not set; `python -m emberscale_operator --help` describes it")
        return value

    def chosen(name: str, default: str, allowed: tuple[str, ...]) -> str:
        value = environment.get(name) or default
        if value not in allowed:
            raise InvalidError(f"{name}={value!r}: expected one of {', '.join(allowed)}")
        return value

    brain_address = environment.get("EMBERSCALE_BRAIN_ADDRESS", "")
    brain_authority = environment.get(BRAIN_CA, "") if brain_address else ""
    if brain_authority:
        client_context(brain_authority.encode(), BRAIN_CA)
    flash_redis_url = environment.get(FLASH_REDIS_URL, "")
    if flash_redis_url and flash_redis_url == environment.get("EMBERSCALE_REDIS_URL"):
        raise InvalidError(
            f"{FLASH_REDIS_URL} is EMBERSCALE_REDIS_URL: rows would delay the state of all jobs; name another Redis"
        )
    return Settings(
        image=required("EMBERSCALE_IMAGE"),
        redis_url=required("EMBERSCALE_REDIS_URL"),
        flash_redis_url=flash_redis_url,
        namespace=required("EMBERSCALE_NAMESPACE"),
        identity=environment.get("EMBERSCALE_POD_NAME") or socket.gethostname(),
        image_pull_policy=chosen("EMBERSCALE_IMAGE_PULL_POLICY", "IfNotPresent", _PULL_POLICIES),
        image_pull_secrets=_names(environment.get("EMBERSCALE_IMAGE_PULL_SECRETS", "")),
        brain_address=brain_address,
        brain_token=required("EMBERSCALE_BRAIN_TOKEN") if brain_address else "",
        brain_authority=brain_authority,
        job_tls=chosen("EMBERSCALE_JOB_TLS", "false", ("true", "false")) == "true",
        watch_namespaces=_names(environment.get("EMBERSCALE_WATCH_NAMESPACES", "")),
        lease_name=environment.get("EMBERSCALE_LEASE_NAME") or "emberscale-operator",
        cluster_domain=environment.get("EMBERSCALE_CLUSTER_DOMAIN") or "cluster.local",
        metrics_port=_port(environment, "EMBERSCALE_METRICS_PORT", 9090),
        health_port=_port(environment, "EMBERSCALE_HEALTH_PORT", 8080),
        resync=_seconds(environment, "EMBERSCALE_RESYNC", 30.0),
        log_level=_LEVELS[chosen("EMBERSCALE_LOG_LEVEL", "info", tuple(_LEVELS))],
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _port(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdigit() or not 0 <= int(text) <= 65535:
        raise InvalidError(f"{name}={text!r}: expected a port, 0 to 65535")
    return int(text)


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name)
    if not text:
        return default
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise InvalidError(f"{name}: {error}") from error
    if seconds <= 0:
        raise InvalidError(f"{name}={text!r}: must be above 0")
    return seconds
