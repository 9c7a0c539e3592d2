#if canImport(CoreAI)
    import CoreAI
    import SpeculativeStreaming

    /// Keys and values of a part's layers that the host keeps, for functions that take them as an input and put out
    /// new rows (`ss_convert/graph/cache.py`).
    @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
    struct HostCache {
        /// fp16 [2·L, n_kv, C, head_dim]: keys of the layers, then their values.
        private(set) var array: NDArray
        /// Per plane whether its rows are those of the kept nodes rather than those of all nodes.
        private let isAbovePruning: [Bool]

        init(shape: [Int], layers: Range<Int>, firstMSALayer: Int) {
            array = .zeros(shape, .float16)
            let planes = layers.map { $0 >= firstMSALayer }
            isAbovePruning = planes + planes
        }

        /// Writes the first `count` rows of a chunk [2·L, n_kv, T, head_dim] to slots `slot` and following.
        mutating func write(_ rows: NDArray, count: Int, slot: Int) {
            let inOrder = Array(0..<count)
            copy(rows, to: slot) { _ in inOrder }
        }

        /// Writes the accepted rows of a step [2·L, n_kv, N, head_dim] to their slots.
        mutating func commit(_ rows: NDArray, _ accepted: PendingCommit) {
            let isAbovePruning = isAbovePruning
            copy(rows, to: accepted.slot) { isAbovePruning[$0] ? accepted.rows : accepted.nodes }
        }

        /// taken: which rows of a plane, in the order of their slots. What functions put out is contiguous.
        private mutating func copy(_ rows: NDArray, to slot: Int, taken: (_ plane: Int) -> [Int]) {
            let (planes, heads, slots) = (array.shape[0], array.shape[1], array.shape[2])
            let (height, row) = (rows.shape[2], 2 * array.shape[3])
            rows.rawView().withUnsafeBytes { source, _, _ in
                array.mutableRawView().withUnsafeMutableBytes { target, _, _ in
                    for plane in 0..<planes {
                        let taken = taken(plane)
                        for matrix in plane * heads..<(plane + 1) * heads {
                            for (index, from) in taken.enumerated() {
                                (target + row * (matrix * slots + slot + index)).copyMemory(
                                    from: source + row * (matrix * height + from), byteCount: row)
                            }
                        }
                    }
                }
            }
        }
    }
#endif
