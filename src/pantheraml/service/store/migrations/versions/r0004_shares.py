"""Add the share of its devices that a start of a job held."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("stretches", sa.Column("share", sa.Float(), nullable=False, server_default="1"))
