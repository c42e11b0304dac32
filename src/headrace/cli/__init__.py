"""The `headrace` command: one module per subcommand."""
