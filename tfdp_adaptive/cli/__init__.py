"""The command line, `tfdp`: one module per subcommand."""
