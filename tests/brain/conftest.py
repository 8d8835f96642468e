import os
import tempfile
import uuid
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def socket_folder() -> Path:
    """Where a server may put its folder: a short path, since socket paths have at most 107 characters, that any user
    can reach, which pytest's own folders are not."""
    return Path(os.path.realpath(tempfile.gettempdir())) / f"emberscale-{uuid.uuid4().hex[:12]}"
