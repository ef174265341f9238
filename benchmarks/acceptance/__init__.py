"""Acceptance: what others write trains, ends as good, and goes on after faults."""
