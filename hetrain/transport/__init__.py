"""How requests reach owners."""
