"""A model beside another one, or beside itself in float32: how far apart, where, and why."""
