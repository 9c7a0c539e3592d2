"""States (MIL: read_state, coreml_update_state, which files hold as write_state + read_state)."""

from ..registry import op


@op("read_state", view=True)
def read_state(call, input):
    """MIL read_state: the value of the state at this time."""
    return input.read()


@op("write_state")
def write_state(call, input, data):
    """File form of a state update: stores, returns nothing."""
    input.write(data, call.owned)
    return ()


@op("coreml_update_state", view=True)
def coreml_update_state(call, state, value):
    """MIL coreml_update_state: stores the value and returns it."""
    state.write(value, call.owned)
    return value
