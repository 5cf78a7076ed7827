"""First tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("user", sa.String(length=255), nullable=False),
        sa.Column("action", sa.String(length=255), nullable=False),
        sa.Column("target", sa.String(length=255), nullable=False),
        sa.Column("request_id", sa.String(length=255), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_table(
        "files",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("purpose", sa.String(length=255), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("rows", sa.Integer(), nullable=True),
        sa.Column("format", sa.String(length=255), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    with op.batch_alter_table("files", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_files_created_at"), ["created_at"], unique=False)
        batch_op.create_index("ix_files_page", ["owner", "created_at", "id"], unique=False)

    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("training_file", sa.String(length=255), nullable=False),
        sa.Column("validation_file", sa.String(length=255), nullable=True),
        sa.Column("suffix", sa.String(length=255), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("user_metadata", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("hyperparameters", sa.JSON(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("plan", sa.JSON(), nullable=False),
        sa.Column("predicted_seconds", sa.Float(), nullable=True),
        sa.Column("processes", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(length=255), nullable=False),
        sa.Column("gpu_ids", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("leased", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("is_test", sa.Boolean(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("place", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("max_runtime", sa.Float(), nullable=True),
        sa.Column("idempotency_key", sa.String(length=255), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("queued_at", sa.Float(), nullable=True),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("state_at", sa.Float(), nullable=False),
        sa.Column("seconds_run", sa.Float(), nullable=False),
        sa.Column("energy_joules", sa.Float(), nullable=True),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("crashes", sa.Integer(), nullable=False),
        sa.Column("crashed_at_step", sa.Integer(), nullable=True),
        sa.Column("waiting_reason", sa.Text(), nullable=True),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("fine_tuned_model", sa.Text(), nullable=True),
        sa.Column("trained_tokens", sa.BigInteger(), nullable=True),
        sa.Column("model_deleted_at", sa.Float(), nullable=True),
        sa.Column("result_files", sa.JSON(), nullable=False),
        sa.Column("events_offset", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_jobs_created_at"), ["created_at"], unique=False)
        batch_op.create_index("ix_jobs_page", ["owner", "created_at", "id"], unique=False)
        batch_op.create_index(batch_op.f("ix_jobs_state"), ["state"], unique=False)
        batch_op.create_index("uq_jobs_idempotency", ["owner", "idempotency_key"], unique=True)

    op.create_table(
        "keys",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("user", sa.String(length=255), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
        sa.UniqueConstraint("hash", name=op.f("uq_keys_hash")),
    )
    with op.batch_alter_table("keys", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_keys_user"), ["user"], unique=False)

    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("level", sa.String(length=8), nullable=False),
        sa.Column("kind", sa.String(length=255), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_events_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index("ix_events_job", ["job_id", "id"], unique=False)
        batch_op.create_index("ix_events_kind", ["job_id", "kind", "id"], unique=False)
        incident = sa.text("level <> 'info'")
        batch_op.create_index(
            "ix_events_incidents", ["id"], unique=False, sqlite_where=incident, postgresql_where=incident
        )

    op.create_table(
        "leases",
        sa.Column("resource", sa.String(length=255), nullable=False),
        sa.Column("job_id", sa.String(length=255), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_leases_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("resource", name=op.f("pk_leases")),
    )
    with op.batch_alter_table("leases", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_leases_job_id"), ["job_id"], unique=False)

    op.create_table(
        "multigpu_settings",
        sa.Column("user", sa.String(length=255), nullable=False),
        sa.Column("gpus", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("training", sa.JSON(none_as_null=True), nullable=True),
        sa.PrimaryKeyConstraint("user", name=op.f("pk_multigpu_settings")),
    )
    op.create_table(
        "disabled_devices",
        sa.Column("resource", sa.String(length=255), nullable=False),
        sa.Column("user", sa.String(length=255), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("resource", name=op.f("pk_disabled_devices")),
    )
    op.create_table(
        "stretches",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=255), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("device", sa.String(length=255), nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("energy_joules", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stretches")),
    )
    with op.batch_alter_table("stretches", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_stretches_job_id"), ["job_id"], unique=False)
        batch_op.create_index("ix_stretches_period", ["started_at", "ended_at"], unique=False)
    op.create_table(
        "page_sessions",
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["keys.id"], name=op.f("fk_page_sessions_key_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_page_sessions")),
    )
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("purpose", sa.String(length=255), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.Column("file_lifetime", sa.Float(), nullable=True),
        sa.Column("file_id", sa.String(length=255), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
    )
    with op.batch_alter_table("uploads", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_uploads_owner"), ["owner"], unique=False)
        batch_op.create_index(batch_op.f("ix_uploads_status"), ["status"], unique=False)

    op.create_table(
        "upload_parts",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("upload_id", sa.String(length=255), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["upload_id"], ["uploads.id"], name=op.f("fk_upload_parts_upload_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_upload_parts")),
    )
    with op.batch_alter_table("upload_parts", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_upload_parts_upload_id"), ["upload_id"], unique=False)

    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("event_types", sa.JSON(), nullable=False),
        sa.Column("secret", sa.String(length=255), nullable=False),
        sa.Column("old_secret", sa.String(length=255), nullable=True),
        sa.Column("old_secret_until", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_endpoints")),
    )
    with op.batch_alter_table("webhook_endpoints", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_webhook_endpoints_owner"), ["owner"], unique=False)

    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("endpoint_id", sa.String(length=255), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("next_at", sa.Float(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["endpoint_id"],
            ["webhook_endpoints.id"],
            name=op.f("fk_webhook_deliveries_endpoint_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_deliveries")),
    )
    with op.batch_alter_table("webhook_deliveries", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_webhook_deliveries_endpoint_id"), ["endpoint_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_webhook_deliveries_next_at"), ["next_at"], unique=False)


def downgrade() -> None:
    op.drop_table("page_sessions")
    raise NotImplementedError("the first version has none before it")
