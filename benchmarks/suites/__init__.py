"""Suites: lists of cases that compare systems in one go; `benchmarks/suite.py` runs them."""
