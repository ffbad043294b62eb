"""What finds a mistake in a user's own model: `debug`, `check_padding`, and the poison both use."""
