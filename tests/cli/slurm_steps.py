"""Commands that Slurm starts as several processes; one process is killed."""

SLURM = """
import os, socket, sys, time
import lightning.fabric.plugins.environments.slurm  # once, before the processes are forked
from fewshot_callbacks.files import journal
from fewshot_callbacks.cli import evaluate
from fewshot_callbacks.cli.main import main

journal.INTERVAL = journal.COST_FACTOR = 0
write, left = journal.StateFiles.write, [0]
def killed(files, position, arrays):
    write(files, position, arrays)
    left[0] -= 1
    if left[0] == 0 and os.environ["SLURM_PROCID"] == "1":
        open("killed", "w").write(str(time.time()))
        os.kill(os.getpid(), 9)
journal.StateFiles.write = killed

numbers = {"JOB_ID": 17, "STEP_ID": 0, "NTASKS_PER_NODE": 2, "NODEID": 0, "NODELIST": "127.0.0.1"}
for step, (writings, tasks) in enumerate([(3, 2), (0, 1), (0, 2)]):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    children = []
    for rank in range(tasks):
        children.append(os.fork())
        if children[-1] == 0:
            for number, name in enumerate(("out", "err"), 1):
                os.dup2(os.open(f"{step}.{rank}.{name}", os.O_WRONLY | os.O_CREAT), number)
            own = numbers | {"NTASKS": tasks, "PROCID": rank, "LOCALID": rank}
            os.environ |= {f"SLURM_{name}": str(number) for name, number in own.items()}
            left[0], journal.INTERVAL = writings, 60 * (writings == 0)  # what is not killed need not write
            sys.exit(main())
    print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
    if step == 0:
        open("ended", "w").write(str(time.time()))
"""
"""Steps of a Slurm job: two processes, one of them killed at its third write; then one process; then two again."""
