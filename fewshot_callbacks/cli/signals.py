"""The exit statuses after signals, and the exception for SIGTERM."""

# As in a shell: 128 plus the number of SIGINT, SIGPIPE or SIGTERM.
INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143


class Terminated(KeyboardInterrupt):
    """Raised after Lightning has ended a run cleanly because of SIGTERM."""
