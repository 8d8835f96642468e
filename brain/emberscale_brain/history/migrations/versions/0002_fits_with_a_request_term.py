"""Fits have a sixth coefficient, what a PS does for each batch however few of its rows it holds: 0 in earlier ones."""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_jobs = sa.table("jobs", sa.column("uid", sa.String()), sa.column("fit", sa.Text()))
_plans = sa.table("plans", sa.column("id", sa.BigInteger()), sa.column("explanation", sa.Text()))


def upgrade() -> None:
    """Fits of jobs, and those in the explanations of plans."""
    _rewrite(_jobs, _jobs.c.uid, _jobs.c.fit, _with_request)
    _rewrite(_plans, _plans.c.id, _plans.c.explanation, lambda explanation: _of_fit(explanation, _with_request))


def downgrade() -> None:
    """The first five alone."""
    _rewrite(_jobs, _jobs.c.uid, _jobs.c.fit, _without_request)
    _rewrite(_plans, _plans.c.id, _plans.c.explanation, lambda explanation: _of_fit(explanation, _without_request))


def _rewrite(table: Any, key: Any, column: Any, change: Any) -> None:
    connection = op.get_bind()
    for row_key, text in connection.execute(sa.select(key, column).where(column.is_not(None))).all():
        changed = json.dumps(change(json.loads(text)), separators=(",", ":"))
        connection.execute(table.update().where(key == row_key).values({column: changed}))


def _of_fit(explanation: dict[str, Any], change: Any) -> dict[str, Any]:
    fit = explanation.get("fit")
    return explanation if fit is None else explanation | {"fit": change(fit)}


def _with_request(fit: dict[str, Any]) -> dict[str, Any]:
    covariance = [[*row, 0.0] for row in fit["covariance"]]
    return fit | {
        "coefficients": [*fit["coefficients"], 0.0],
        "covariance": [*covariance, [0.0] * (len(covariance) + 1)],
    }


def _without_request(fit: dict[str, Any]) -> dict[str, Any]:
    return fit | {
        "coefficients": fit["coefficients"][:-1],
        "covariance": [row[:-1] for row in fit["covariance"][:-1]],
    }
