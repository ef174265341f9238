"""What all optimizer wrappers have in common: adapters, delegation, saving."""
