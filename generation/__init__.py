"""One decoding round: draft, verify, commit."""
