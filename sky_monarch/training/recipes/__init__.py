"""Complete training programs, each one file to be read from top to bottom."""
