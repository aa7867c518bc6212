"""Is a task server ready for training? Plays one episode, and says. The same as `treetune probe URL`."""

import argparse
import sys

from treetune.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="http://localhost:5000")
    parser.add_argument("--task_index", type=int, default=0)
    args = parser.parse_args()
    action = "Think: I look around.\n\nAct: bash\n\n```bash\nls /\n```"
    sys.exit(main(["probe", args.server, "--task-index", str(args.task_index), "--action", action]))
