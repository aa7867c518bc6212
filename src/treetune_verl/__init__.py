"""The import paths under which verl recipes know dataset tasks."""
