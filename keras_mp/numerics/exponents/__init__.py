"""Histograms of exponents: what they count, what a dtype makes of it, and what follows."""
