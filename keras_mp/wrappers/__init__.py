"""What all optimizer wrappers have in common: delegation, saving, older spellings."""
