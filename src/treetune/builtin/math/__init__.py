"""Mathematics: sums, grade-school problems, competitions."""
