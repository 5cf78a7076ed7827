"""Alerts of a running job."""

from __future__ import annotations

PREFIX = "alert."
