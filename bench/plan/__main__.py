from absl import app, flags

from bench.plan import main

flags.adopt_module_key_flags(main)  # For --help.
app.run(main.main)
