"""Oracles: the plainest statements of what the package must do, sharing no code with it.

`ragged_rows` says what compact and expand mean, row by row. `moe` and `model` are a small
mixture-of-experts language model, to train with and without a stash; `mla` is an attention for it,
and `modes` has its layer spread over devices in five ways.
"""
