"""`make plan`: which residuals to keep where, of a model on a mesh: memory, replays and traffic."""
