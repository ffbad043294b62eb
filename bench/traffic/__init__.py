"""What it costs a layer to keep its residuals, each way: bytes and time beside its matmuls."""
