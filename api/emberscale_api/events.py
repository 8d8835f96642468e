"""Structured logs: one JSON object per line, with the job, the role and the index in every line."""

import logging
import sys

import structlog


def configure_logging(job: str, role: str, index: int, level: int = logging.INFO) -> None:
    """Sends every event of this process to stderr as one JSON object a line."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _Identity(job, role, index),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


class _Identity:
    """Adds the process's identity. It is a processor because threads do not inherit context variables."""

    def __init__(self, job: str, role: str, index: int) -> None:
        self._fields = {"job": job, "role": role, "index": index}

    def __call__(self, logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**self._fields, **event}
