"""Frozen base weights in few bits: own buffers, never parameters."""
