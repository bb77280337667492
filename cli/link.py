"""Puts a bad line between a client and a server on one machine: delay, jitter, bandwidth, and cuts.

A TCP proxy. Lines on standard input cut the line and restore it: rst, fin, blackhole, blackhole-up, blackhole-down,
midframe-up, midframe-down, refused, restore.
"""

import argparse
import sys
import time

EXAMPLE = "moa link --listen 127.0.0.1:9000 --to 127.0.0.1:8040 --profile 4g"


def address(text: str) -> tuple[str, int]:
    """An argparse type: host:port."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 65536:
        raise argparse.ArgumentTypeError(f"must be host:port, not {text}")
    return host.strip("[]"), int(port)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..serving.link import PROFILES

    parser.add_argument(
        "--listen", type=address, default=("127.0.0.1", 9000), metavar="HOST:PORT", help="(default: 127.0.0.1:9000)"
    )
    parser.add_argument(
        "--to", type=address, default=("127.0.0.1", 8040), metavar="HOST:PORT", help="(default: 127.0.0.1:8040)"
    )
    parser.add_argument("--profile", choices=list(PROFILES), default="4g", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of jitter and black holes (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    from ..serving.link import CUTS, Link

    (to_host, to_port), (host, port) = args.to, args.listen
    with Link(to_host, to_port, args.profile, args.seed, host, port) as link:
        print(f"{host}:{link.port} leads to {to_host}:{to_port} over {args.profile}; Ctrl-C ends it", flush=True)
        try:
            for line in sys.stdin:
                word = line.strip()
                if word == "restore":
                    link.restore()
                elif word in CUTS:
                    link.cut(word)
                elif word:
                    print(f"one of {', '.join(CUTS)} or restore, not {word}", flush=True)
                    continue
                if word:
                    print(f"{word}; {link.bytes_up} bytes up, {link.bytes_down} down so far", flush=True)
            while True:  # standard input is closed: run until interrupted
                time.sleep(3600)
        except KeyboardInterrupt:
            print(f"{link.bytes_up} bytes up, {link.bytes_down} down")
