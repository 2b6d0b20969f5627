"""Whether a replica may be chosen, from how its last answers ended: one rule for all its faults.

    healthy --ejected, until a time--> on probation: one request --it is answered--> healthy
                    ^                           |
                    +------ twice as long ------+ it fails

A death ejects at once, and so does an answer that does not begin or does not go on; errors do when
most answers are errors. A replica with no room (status 503) names the time itself, and needs no
probation. Times are an event loop's. Nothing here knows of HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 0.5  # seconds of the first ejection, doubled each time
LONGEST = 30.0
WEIGHT = 1 / 8  # of the newest answer in the share of errors
LIMIT = 0.5  # share of errors above which a replica is ejected


@dataclass(eq=False)
class Standing:
    """failures: ejections in a row. errors: share of the last answers, moving. until: the end of
    the ejection. probing: the one request of a probation is in flight."""

    failures: int = 0
    errors: float = 0.0
    until: float = 0.0
    probing: bool = False

    def open(self, now: float) -> bool:
        """Whether the replica may be chosen for another request."""
        return now >= self.until and not self.probing

    def begin(self) -> bool:
        """A request is sent there. Returns whether it is a probe; if so, call `end` after it."""
        self.probing, probe = self.failures > 0, self.failures > 0
        return probe

    def end(self) -> None:
        self.probing = False

    def good(self, now: float) -> None:
        """A request was answered. Answers that began before an ejection do not end it."""
        self.errors *= 1 - WEIGHT
        if now >= self.until:
            self.failures = 0

    def bad(self, weight: float = WEIGHT) -> bool:
        """A request was answered with an error, or not at all (`weight` 1). Returns whether the
        replica should be ejected."""
        self.errors += (1 - self.errors) * weight
        return self.failures > 0 or self.errors > LIMIT

    def eject(self, now: float) -> None:
        """Eject it, unless it is ejected now."""
        if now >= self.until:
            self.until = now + min(LONGEST, FIRST * 2**self.failures)
            self.failures, self.errors = self.failures + 1, 0.0

    def forgive(self) -> None:
        """No other replica is better."""
        self.failures, self.errors = 0, 0.0

    def avoid(self, now: float, seconds: float) -> None:
        """It has no room for some time."""
        self.until = max(self.until, now + min(LONGEST, seconds))
