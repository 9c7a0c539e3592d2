"""Commands killed, refused and raced at every change that they make to files.

A command runs in a child process whose system calls that change files are announced to this one before
they happen (`system_calls`), whichever library makes them. At each of them the child stands still: the
files as they are then are what a kill would leave, so the checks run on a copy of them (`kills`); or the
call is refused like by a full disk (`refusals`); or another command runs in between (`races`).
"""
