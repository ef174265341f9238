"""What all optimizer wrappers have in common.

A wrapper in a wrapper, the properties of a loss scale, older arguments.
"""
