"""Control flow (MIL: cond, while_loop)."""

from ..registry import op


@op("cond", control=True)
def cond(call, run_block, pred):
    """MIL cond: runs the first block if pred is true, else the second."""
    return run_block(0 if bool(pred) else 1)


@op("while_loop", control=True, tuples=("loop_vars",))
def while_loop(call, run_block, loop_vars):
    """MIL while_loop: the first block is the condition, the second the body."""
    values = list(loop_vars)
    while bool(run_block(0, *values)[0]):
        values = run_block(1, *values)
    return values
