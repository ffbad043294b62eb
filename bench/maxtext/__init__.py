"""MaxText itself with a stash: trained small, and compiled ahead of time. See docs/maxtext.md."""
