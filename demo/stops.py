"""Stop requests, visitor by visitor. Knows sessions and flags, nothing else."""

import threading


class Stops:
    """The decodings that each visitor has waiting or running, and how to stop them. Safe with several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[str, list[threading.Event]] = {}

    def begin(self, session: str) -> threading.Event:
        """A flag for a decoding that is about to wait for its turn."""
        event = threading.Event()
        with self._lock:
            self._events.setdefault(session, []).append(event)
        return event

    def latest(self, session: str) -> threading.Event:
        """The flag of the decoding whose turn has come: the one begun last, or a new one."""
        with self._lock:
            events = self._events.get(session)
            if events:
                return events[-1]
        return self.begin(session)

    def end(self, session: str, event: threading.Event) -> None:
        """Forgets a decoding that is over."""
        with self._lock:
            left = [other for other in self._events.pop(session, []) if other is not event]
            if left:
                self._events[session] = left

    def stop(self, session: str) -> int:
        """Stops all of a visitor's decodings; returns how many there are."""
        with self._lock:
            events = list(self._events.get(session, []))
        for event in events:
            event.set()
        return len(events)
