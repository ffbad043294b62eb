"""`make demo`: trains a small ring-of-experts model, with and without the stash."""
