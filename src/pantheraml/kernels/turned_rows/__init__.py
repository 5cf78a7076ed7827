"""Rows in e4m3 turned into columns, as the gradient of a weight reads them."""

from pantheraml.kernels.turned_rows.op import turned_rows
from pantheraml.kernels.turned_rows.reference import reference_turned_rows

__all__ = ["reference_turned_rows", "turned_rows"]
