"""Which brain the database belongs to: nobody's, until one claims it."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """No row."""
    op.create_table(
        "claims",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("token", sa.String(32), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("begun_at", sa.Double(), nullable=False),
    )


def downgrade() -> None:
    """Without them."""
    op.drop_table("claims")
