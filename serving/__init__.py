"""The two halves of a drafter on two machines (docs/serving.md, docs/protocol.md).

Both: messages, memory_codec, identity, choosing. Server: server, connection, sessions, decoding, auth, metrics.
Client: client, line, client_memory, draft_length, events. Between them: link, which makes a line bad.
"""
