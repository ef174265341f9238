"""What all optimizer wrappers have in common.

Delegation to the inner optimizer, saving, the properties of a loss scale, older spellings.
"""
