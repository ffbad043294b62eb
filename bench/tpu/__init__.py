"""Compiles for TPUs on a host without one, and reads what was compiled. Tests use it too."""
