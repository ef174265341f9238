"""What training in 16 bits does to the numbers, measured.

Each tool is a module of its own. What is gathered on the device stays there until somebody asks.
"""

__all__ = []
