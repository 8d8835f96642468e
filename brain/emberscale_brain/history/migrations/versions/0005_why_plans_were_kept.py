"""Plans keep their own action and reason, and beside them why a later round left the shape as it was."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Empty in what was written before: the later reason took the place of the plan's own."""
    op.add_column("plans", sa.Column("kept", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    """Without it."""
    op.drop_column("plans", "kept")
