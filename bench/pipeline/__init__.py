"""`make pipeline`: the demo's model through pipeline schedules, its residuals in pages."""
