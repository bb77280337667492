"""The `moa` command-line tool."""


def main() -> None:
    raise SystemExit("moa: no subcommand yet")
