"""What every subpackage uses: messages, checks of arguments, and where the code runs.

What is here needs TensorFlow only.
"""
