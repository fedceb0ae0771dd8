"""What the subcommands of ``ninfer-run`` do, one module each; ``cli.py`` only parses."""
