"""Measurements, side by side with a peer in the same run, as JSON lines; `python -m benches` runs all."""
