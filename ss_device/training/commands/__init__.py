"""`ss-train`, one module per sub-command: its options, made from settings classes, and what it runs.

The parsed options end here: what a command calls gets settings. What loads PyTorch is imported when it
runs, so that `--help` answers at once.
"""
