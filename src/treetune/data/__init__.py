"""Files: trainers' rows (`rows/`), tasksets over datasets (`datasets/`), rules that rows must keep (`validate/`)."""
