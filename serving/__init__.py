"""The two halves of a drafter on two machines: server and client."""
