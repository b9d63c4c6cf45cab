"""Train on AMD Instinct GPUs that crash and get pre-empted, and lose almost nothing."""
