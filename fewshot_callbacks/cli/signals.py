"""The exit statuses of a command that a signal has ended, and the exception for SIGTERM."""

# The statuses of a shell: 128 plus SIGINT, SIGPIPE and SIGTERM.
INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143


class Terminated(KeyboardInterrupt):
    """Lightning has ended a run, cleanly, because the process received SIGTERM."""
