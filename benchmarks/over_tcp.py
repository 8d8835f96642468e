"""The `emberscale` command for benchmarks, whose parameter servers listen on TCP as on a cluster.

On one machine they use Unix sockets, which no limit of a network reaches, and which TLS leaves plain.
"""

import sys
from collections.abc import Mapping

from emberscale._cli import main
from emberscale_api.environment import SOCKET_DIRECTORY
from emberscale_operator.local.environment import JobEnvironment
from emberscale_operator.machine import InstanceId, Resources

OVER_TCP = (sys.executable, __file__)
"""The command line that takes the place of `emberscale`."""

_of = JobEnvironment.of


def _without_sockets(
    self: JobEnvironment, instance: InstanceId, resources: Resources, inherited: Mapping[str, str]
) -> dict[str, str]:
    variables = _of(self, instance, resources, inherited)
    del variables[SOCKET_DIRECTORY]
    return variables


if __name__ == "__main__":
    JobEnvironment.of = _without_sockets  # type: ignore[method-assign]  # no user wants that: there is no setting for it
    sys.argv[0] = "emberscale"
    main()
