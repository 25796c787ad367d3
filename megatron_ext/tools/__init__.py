"""Command-line tools around the launcher (doctor, lock, data, compare)."""
