"""Run notebooks written for Unsloth on a CPU, with tiny models and synthetic data: see `tools/run_notebooks.py`."""
