/// Lets one caller in at a time, in the order in which they came: what an actor does not do for a call that waits.
///
/// Belongs to one actor, on which all of its methods run.
package final class Turns {
    private var isTaken = false
    private var waiting: [CheckedContinuation<Void, Never>] = []

    package init() {}

    /// Waits for a turn, which ends with `leave`.
    package func enter(isolation: isolated (any Actor)? = #isolation) async {
        guard isTaken else {
            isTaken = true
            return
        }
        await withCheckedContinuation { waiting.append($0) }
    }

    /// Lets the next one in; the turn passes to it directly.
    package func leave() {
        if waiting.isEmpty { isTaken = false } else { waiting.removeFirst().resume() }
    }
}
