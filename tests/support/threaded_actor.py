"""An actor whose module starts a thread where it is imported, as libraries do that compute."""

from __future__ import annotations

import os
import threading

from sky_monarch.actor import Actor, endpoint

threading.Thread(target=threading.Event().wait, daemon=True).start()


class Threaded(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()
