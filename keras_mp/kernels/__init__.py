"""What TensorFlow computes, computed so that it is right in 16 bits. Needs TensorFlow only."""
