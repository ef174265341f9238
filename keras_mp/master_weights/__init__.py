"""Float32 weights behind variables in 16 bits: how they are kept, and how optimizers see them.

This subpackage needs TensorFlow only.
"""
