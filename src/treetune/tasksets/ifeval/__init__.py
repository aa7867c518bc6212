"""IFEval: answers that must follow instructions which a program can verify."""
