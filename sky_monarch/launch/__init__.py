"""Turns a job into running processes: the only layer that knows where they run."""
