"""Programs that show what the package does, and measure it. Run them from the repository root."""
