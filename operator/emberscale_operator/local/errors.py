"""What can keep a job from starting here."""

from emberscale_api.errors import StartError


class CertificatesUnusableError(StartError):
    """The processes are to serve TLS, with certificates that cannot be used."""


class RedisUnavailableError(StartError):
    """No Redis: neither the one that was named nor one of the job's own."""


class PortUnavailableError(StartError):
    """The port for the master is taken, or may not be used."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(
            f"--master-port {port}: port {port} on {host} is unavailable: {reason}; choose another, or 0 for any"
        )
        self.port = port
