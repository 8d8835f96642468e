"""Profiles keep how many samples there are, failures and the cost of checkpoints; jobs the plan that they followed."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_PROFILE_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("total_samples", sa.BigInteger()),
    ("failures", sa.BigInteger()),
    ("checkpoint_cost", sa.Double()),
)


def upgrade() -> None:
    """0 in what was written before, as for jobs that do not know it yet."""
    for name, kind in _PROFILE_COLUMNS:
        op.add_column("profiles", sa.Column(name, kind, nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("last_plan", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Without them."""
    op.drop_column("jobs", "last_plan")
    for name, _ in reversed(_PROFILE_COLUMNS):
        op.drop_column("profiles", name)
