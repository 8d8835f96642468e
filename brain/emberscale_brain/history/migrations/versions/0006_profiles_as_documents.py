"""Profiles are documents, not a column a field."""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_Json = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
_SHAPE: tuple[tuple[str, str, Any], ...] = (
    ("workers", "workers", sa.Integer()),
    ("ps", "ps", sa.Integer()),
    ("worker_cpu", "worker_cpu", sa.Double()),
    ("ps_cpu", "ps_cpu", sa.Double()),
    ("worker_memory_limit", "worker_memory", sa.BigInteger()),
    ("ps_memory_limit", "ps_memory", sa.BigInteger()),
)
_FIELDS: tuple[tuple[str, Any], ...] = (
    ("batch_size", sa.Integer()),
    ("iteration_seconds", sa.Double()),
    ("throughput", sa.Double()),
    ("samples", sa.BigInteger()),
    ("rows", sa.BigInteger()),
    ("ps_memory", sa.BigInteger()),
    ("worker_memory", sa.BigInteger()),
    ("worker_cpu_utilization", sa.Double()),
    ("ps_cpu_utilization", sa.Double()),
    ("stage_fractions", _Json),
    ("restarted", sa.Boolean()),
    ("total_samples", sa.BigInteger()),
    ("failures", sa.BigInteger()),
    ("checkpoint_cost", sa.Double()),
)
_columns = [*((column, kind) for column, _, kind in _SHAPE), *_FIELDS]
_profiles = sa.table(
    "profiles",
    sa.column("id", sa.BigInteger()),
    sa.column("time", sa.Double()),
    sa.column("profile", sa.Text()),
    *(sa.column(name, kind) for name, kind in _columns),
)


def upgrade() -> None:
    """Puts the columns of each profile together."""
    op.add_column("profiles", sa.Column("profile", sa.Text(), nullable=False, server_default="{}"))
    wanted = [_profiles.c.id, _profiles.c.time, *(_profiles.c[name] for name, _ in _columns)]

    def document(row: Any) -> dict[str, Any]:
        shape = {name: row[column] for column, name, _ in _SHAPE}
        return {"time": row["time"], "shape": shape, **{name: row[name] for name, _ in _FIELDS}}

    _rewrite(wanted, lambda row: {"profile": json.dumps(document(row), separators=(",", ":"))})
    with op.batch_alter_table("profiles") as table:
        table.alter_column("profile", server_default=None)
        for name, _ in _columns:
            table.drop_column(name)


def downgrade() -> None:
    """Takes them apart."""
    for name, kind in _columns:
        op.add_column("profiles", sa.Column(name, kind, nullable=True))

    def values(row: Any) -> dict[str, Any]:
        document = json.loads(row["profile"])
        shape = {column: document["shape"][name] for column, name, _ in _SHAPE}
        return {**shape, **{name: document[name] for name, _ in _FIELDS}}

    _rewrite([_profiles.c.id, _profiles.c.profile], values)
    with op.batch_alter_table("profiles") as table:
        for name, _ in _columns:
            table.alter_column(name, nullable=False)
        table.drop_column("profile")


def _rewrite(wanted: list[Any], values: Any) -> None:
    connection = op.get_bind()
    for row in connection.execute(sa.select(*wanted)).mappings().all():
        connection.execute(_profiles.update().where(_profiles.c.id == row["id"]).values(values(row)))
