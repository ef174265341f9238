"""What every subpackage uses: messages, checks of arguments, where code runs.

The modules here need TensorFlow only.
"""
