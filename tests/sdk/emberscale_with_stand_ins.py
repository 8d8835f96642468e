"""The `emberscale` command, with stand-ins for the processes that train."""

import sys
from pathlib import Path
from typing import cast

from emberscale._cli import main
from emberscale_api.job.roles import Role
from emberscale_operator.local.runner import COMMANDS

_STAND_IN = Path(__file__).parents[1] / "operator" / "stand_in.py"


def replace_what_trains() -> None:
    """Replaces the processes of this process's jobs by stand-ins, which train nothing."""
    for role in (Role.MASTER, Role.PS, Role.WORKER):
        cast(dict[Role, tuple[str, ...]], COMMANDS)[role] = (sys.executable, str(_STAND_IN), str(role))


if __name__ == "__main__":
    replace_what_trains()
    main()
