"""Float32 weights behind variables in 16 bits.

The modules keep them, and show them to optimizers. This subpackage needs TensorFlow only.
"""
