"""Run by Alembic: migrate over the connection that `store.database.upgrade` passes."""

from alembic import context

from pantheraml.service.store.tables import Base

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
