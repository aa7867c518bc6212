"""Dataset tasks: tasksets declared in config over a Hugging Face dataset or files, built into cached parquet."""
