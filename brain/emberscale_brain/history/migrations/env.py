"""Alembic's entry: runs the migrations on the engine that `history.database.migrate` brings."""

from alembic import context
from sqlalchemy import Engine, text

from emberscale_brain.history.tables import HistoryTable

_LOCK = 0x656D6272

engine: Engine = context.config.attributes["engine"]
with engine.connect() as connection:
    context.configure(
        connection=connection, target_metadata=HistoryTable.metadata, render_as_batch=True, transactional_ddl=True
    )
    with context.begin_transaction():
        if engine.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL statement_timeout = 0"))  # a large table takes long to alter
            # two brains that start together take turns
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        else:
            connection.execute(text("BEGIN IMMEDIATE"))  # the driver begins none for changes of the schema
        context.run_migrations()
