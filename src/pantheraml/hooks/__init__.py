"""Patches of other libraries: applied on demand, for known versions, and revertible."""
