"""What keeps a host from training well, and what to do about it.

Everything here looks at one host, joins no rendezvous and ends in bounded time. What is read from files is read
below a root folder, so that trees of other hosts can be examined; what has to be tried (libraries, devices) is tried
by a child process that is ended when it takes too long.
"""

from __future__ import annotations

from sky_monarch.doctor.examine import Examination, Situation, examine
from sky_monarch.doctor.finding import Finding, Severity
from sky_monarch.doctor.wanted import Wanted

__all__ = ["Examination", "Finding", "Severity", "Situation", "Wanted", "examine"]
