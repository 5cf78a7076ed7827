"""Multi-process benchmarks: how their processes are launched, and what each runs."""
