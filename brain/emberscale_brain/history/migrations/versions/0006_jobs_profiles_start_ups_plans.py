"""Jobs, profiles, start-ups, plans, and which brain the database belongs to.

The first schema that was released; what came before it is not upgraded.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0006"
down_revision = None
branch_labels = None
depends_on = None

_Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_Json = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def _job_uid() -> sa.Column[str]:
    return sa.Column("job_uid", sa.String(255), sa.ForeignKey("jobs.uid", ondelete="CASCADE"), nullable=False)


def upgrade() -> None:
    """Creates all tables."""
    op.create_table(
        "jobs",
        sa.Column("uid", sa.String(255), primary_key=True),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("architecture", sa.String(255), nullable=False),
        sa.Column("metadata", _Json, nullable=False),
        sa.Column("bounds", _Json, nullable=False),
        sa.Column("current", _Json),
        sa.Column("priority", sa.Double(), nullable=False),
        sa.Column("fixed", sa.Boolean(), nullable=False),
        sa.Column("submitted_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double()),
        sa.Column("phase", sa.String(32)),
        sa.Column("final_shape", _Json),
        sa.Column("fit", sa.Text()),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("last_plan", sa.BigInteger(), nullable=False, server_default="0"),
    )
    op.create_index("jobs_by_end", "jobs", ["phase", "finished_at"])
    op.create_table(
        "profiles",
        sa.Column("id", _Id, primary_key=True, autoincrement=True),
        _job_uid(),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("profile", sa.Text(), nullable=False),
        sa.UniqueConstraint("job_uid", "sequence", name="profile_once"),
    )
    op.create_index("profiles_by_time", "profiles", ["time"])
    op.create_table(
        "start_ups",
        sa.Column("id", _Id, primary_key=True, autoincrement=True),
        _job_uid(),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("paused_seconds", sa.Double(), nullable=False),
        sa.UniqueConstraint("job_uid", "role", "time", name="start_up_once"),
    )
    op.create_index("start_ups_by_role", "start_ups", ["role", "time"])
    op.create_table(
        "plans",
        sa.Column("id", _Id, primary_key=True, autoincrement=True),
        _job_uid(),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("made_at", sa.Double(), nullable=False),
        sa.Column("planner", sa.String(255), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("shape", _Json),
        sa.Column("explanation", sa.Text(), nullable=False),
        sa.Column("kept", sa.Text(), nullable=False, server_default=""),
        sa.UniqueConstraint("job_uid", "version", name="plan_once"),
    )
    op.create_table(
        "claims",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("token", sa.String(32), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("begun_at", sa.Double(), nullable=False),
    )


def downgrade() -> None:
    """Drops them."""
    for table in ("claims", "plans", "start_ups", "profiles", "jobs"):
        op.drop_table(table)
