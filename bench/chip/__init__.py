"""`make chip`: what to run first on a TPU."""
