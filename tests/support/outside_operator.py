"""An operator as a process on the test's own machine, with a proxy before the API server."""

import base64
import os
import subprocess
import sys
from pathlib import Path

from api_objects import get
from cluster import setting
from installation import SYSTEM
from recording_proxy import RecordingProxy

HEALTH_PORT = 18080


class OutsideOperator:
    """An operator outside the cluster, whose calls go through a proxy."""

    def __init__(
        self, proxy: RecordingProxy, folder: Path, namespace: str, lease: str = "emberscale-operator", **more: str
    ) -> None:
        secret = get("secret", "emberscale-redis", SYSTEM)
        # names of Services resolve only in pods
        host = f"emberscale-redis.{SYSTEM}.svc.cluster.local"
        address = str(get("service", "emberscale-redis", SYSTEM)["spec"]["clusterIP"])
        self._environment = {
            **os.environ,
            "KUBECONFIG": str(proxy.kubeconfig(folder)),
            "EMBERSCALE_IMAGE": setting("EMBERSCALE_E2E_IMAGE"),
            "EMBERSCALE_REDIS_URL": base64.b64decode(secret["data"]["url"]).decode().replace(host, address),
            "EMBERSCALE_NAMESPACE": SYSTEM,
            "EMBERSCALE_POD_NAME": "outside",
            "EMBERSCALE_LEASE_NAME": lease,
            "EMBERSCALE_WATCH_NAMESPACES": namespace,
            "EMBERSCALE_METRICS_PORT": "19090",
            "EMBERSCALE_HEALTH_PORT": str(HEALTH_PORT),
            **more,
        }
        self._log = folder / "operator.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "emberscale_operator"], env=self._environment, stderr=self._log.open("ab")
        )

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    @property
    def dead(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None

    def ends(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(30)

    def last_words(self) -> str:
        """Waits for the process to end by itself, and returns its output."""
        assert self._process is not None
        self._process.wait(30)
        return self.said

    @property
    def said(self) -> str:
        return self._log.read_text()[-4000:]
