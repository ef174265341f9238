"""Used by every subpackage: messages, checks of arguments, and where the code runs.

The modules here need TensorFlow only.
"""
