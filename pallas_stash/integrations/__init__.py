"""A stash in the programs of others, by a switch of theirs."""
