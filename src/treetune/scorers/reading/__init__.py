"""What a reply says: its answer (`answers`), names (`mentions`), the option it chooses, numbers (`numerals`)."""
