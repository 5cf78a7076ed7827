"""Add preemption of jobs; drop a column that nothing read."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # no batch operation, which recreates the table in SQLite: dropping the old one would delete its events by cascade
    op.add_column("jobs", sa.Column("preempted_by", sa.String(length=255), nullable=True))
    op.drop_column("jobs", "waiting_reason")
