"""`python -m bench.tracing`: how long a stashed function takes to trace."""
