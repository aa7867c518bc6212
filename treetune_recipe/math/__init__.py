"""Math with verl."""
