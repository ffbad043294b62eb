from absl import app, flags

from bench.traffic import main

flags.adopt_module_key_flags(main)  # For --help.
app.run(main.main)
