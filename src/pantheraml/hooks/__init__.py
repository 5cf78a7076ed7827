"""Changes to other libraries: made on demand, for known versions, and revertible."""
