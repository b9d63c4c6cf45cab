"""Measurements, side by side with a peer in the same run. Each prints JSON lines; `python -m benches` runs all."""
