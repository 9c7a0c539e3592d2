#if canImport(Darwin)
    import Dispatch
#endif

/// Loaded functions by what they were loaded from. Those that nobody uses can be let go, those in use are found
/// again as long as somebody uses them.
package struct HeldFunctions<Key: Hashable & Sendable, Function: AnyObject & Sendable>: Sendable {
    private struct WeakFunction: @unchecked Sendable {
        weak var function: Function?
    }

    private var held: [Key: Function] = [:]
    private var inUse: [Key: WeakFunction] = [:]

    package init() {}

    /// Forgets functions that no generator uses; those in use stay until their generator goes.
    package mutating func releaseIdle() { held = [:] }

    package subscript(key: Key) -> Function? {
        mutating get {
            guard let found = held[key] ?? inUse[key]?.function else { return nil }
            held[key] = found
            return found
        }
        set {
            held[key] = newValue
            inUse[key] = newValue.map(WeakFunction.init)
        }
    }
}

/// Calls `handler` when the system asks for memory, as long as the result lives. Nil where systems do not ask.
package func onMemoryPressure(_ handler: @escaping @Sendable () -> Void) -> (any Sendable)? {
    #if canImport(Darwin)
        let source = DispatchSource.makeMemoryPressureSource(eventMask: [.warning, .critical])
        source.setEventHandler(handler: handler)
        source.activate()
        return PressureSource(source: source)
    #else
        return nil
    #endif
}

#if canImport(Darwin)
    /// Keeps a memory pressure source alive.
    private struct PressureSource: @unchecked Sendable {
        let source: any DispatchSourceMemoryPressure
    }
#endif
