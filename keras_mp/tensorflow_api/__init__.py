"""The one door to what TensorFlow keeps for itself.

Each module has the private names of one theme. A name is looked up when it is first used, and one
that this TensorFlow has not got raises `names.MissingName`. `features` lists what each name is for.
"""
