"""How a layer is called: in reach, with raw inputs, and at the rim of a model."""
