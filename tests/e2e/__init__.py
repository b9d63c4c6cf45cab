"""Real Slurm, real sshd and a real SkyPilot API server on this machine, and what sky-monarch does with them."""
