"""Notebooks with their outputs, and the program of RFC 293."""
