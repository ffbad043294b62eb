"""`make parity`: one MoE layer spread over devices in five ways, with and without the stash."""
