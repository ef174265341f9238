"""Hooks in TensorFlow and Keras: what is replaced, when that acts, and observers."""

from keras_mp.hooks.installer import Everywhere, Method, Replacement, When, install, installed

__all__ = ["Everywhere", "Method", "Replacement", "When", "install", "installed"]
