"""Quantized frozen base weights, held in buffers rather than parameters."""
