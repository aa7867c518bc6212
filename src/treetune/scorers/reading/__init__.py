"""Reading replies: the answer (`answers`), names (`mentions`), the chosen option, numbers (`numerals`)."""
