"""Traced functions: their operations, dtypes, work, and whose they are."""
