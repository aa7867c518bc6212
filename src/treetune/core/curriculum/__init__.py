"""Drawing by pass rates: the rates (`profile`), how often each is drawn (`schedule`), of tasks and of sources."""
