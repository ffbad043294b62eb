"""`make fit`: compiles a model of real size for a TPU topology, residuals kept in each way."""
