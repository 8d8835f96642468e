import os
import tempfile
import uuid
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def socket_folder() -> Path:
    """The path of a folder for a server.

    It is short, since socket paths have at most 107 characters, and any user can reach it, unlike pytest's own folders.
    """
    return Path(os.path.realpath(tempfile.gettempdir())) / f"emberscale-{uuid.uuid4().hex[:12]}"
