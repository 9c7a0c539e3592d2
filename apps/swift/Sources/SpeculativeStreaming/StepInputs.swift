/// Memory of one input of a function, as a back end has it.
package protocol InputArray {
    /// An array of zeros.
    init(zeros shape: [Int], _ number: InputNumber) throws

    /// Writes a vector or the one row of a [1, n] array.
    mutating func write(_ values: [Int32])

    /// Calls `body` once per row of an fp16 matrix with its columns.
    mutating func writeHalfRows(_ body: (_ row: Int, _ columns: UnsafeMutableBufferPointer<UInt16>) -> Void)
}

/// Number types of inputs.
package enum InputNumber: Sendable {
    case int32, float16
}

/// fp16 bit patterns of the additive mask (`ss_convert/graph/interface.py`): 0 shows a slot, -10⁴ hides it.
private enum AdditiveMask {
    static let visible: UInt16 = 0
    static let hidden: UInt16 = 0xf0e2
}

/// Rows of the previous step that move to their slots: at the start of the next step (lazy commit), or at once
/// where the host writes the cache.
package struct PendingCommit: Equatable, Sendable {
    /// Slot of the first row.
    package var slot = 0
    /// Node ids of the accepted path and their rows among the kept nodes.
    package var nodes: [Int] = []
    package var rows: [Int] = []

    package init(slot: Int = 0, nodes: [Int] = [], rows: [Int] = []) {
        self.slot = slot
        self.nodes = nodes
        self.rows = rows
    }
}

/// The inputs of a step function (`ss_convert/graph/interface.py`), in memory that every step reuses.
package final class StepInputs<Memory: InputArray> {
    private let size: Int
    private let context: Int
    private var tokens: Memory
    private var positions: Memory
    private var parents: Memory
    private var mask: Memory
    private var commitPosition: Memory?
    private var commitNodes: Memory?
    private var commitRows: Memory?
    private let gate: Memory?

    /// - Parameters:
    ///   - gated: whether main rows attend to their streams, which adds a gate that is open here.
    ///   - commits: whether the function moves the rows of the step before; false where the host writes them.
    package init(_ limits: StepLimits, gated: Bool, commits: Bool = true) throws {
        size = limits.numNodes
        context = limits.context
        tokens = try Memory(zeros: [1, size], .int32)
        positions = try Memory(zeros: [size], .int32)
        parents = try Memory(zeros: [size], .int32)
        mask = try Memory(zeros: [size, context + size], .float16)
        commitPosition = commits ? try Memory(zeros: [1], .int32) : nil
        commitNodes = commits ? try Memory(zeros: [size], .int32) : nil
        commitRows = commits && limits.numKept < size ? try Memory(zeros: [size], .int32) : nil
        gate = gated ? try Memory(zeros: [1], .float16) : nil
    }

    /// The inputs by name.
    package var arrays: [String: Memory] {
        var named = ["tokens": tokens, "positions": positions, "parents": parents, "mask": mask]
        named["commit_position"] = commitPosition
        named["commit_nodes"] = commitNodes
        named["commit_rows"] = commitRows
        named["stream_gate"] = gate
        return named
    }

    /// Fills all inputs for `tree` below `length` committed positions.
    package func fill(_ tree: DraftTree, length: Int, pending: PendingCommit) {
        // Padding repeats the root: any other id might have an all-zero embedding, a 0/0 in a norm.
        tokens.write(padded(tree.tokens, tree.tokens[0]))
        positions.write(padded(tree.depths.map { length + $0 }, length))
        parents.write(padded(tree.parents, -1))
        commitPosition?.write([Int32(pending.slot)])
        commitNodes?.write(padded(pending.nodes, -1))
        commitRows?.write(padded(pending.rows, -1))
        fillMask(tree, length: length)
    }

    /// A real node sees the committed slots, its ancestors and itself; padding sees itself only.
    private func fillMask(_ tree: DraftTree, length: Int) {
        let context = context
        mask.writeHalfRows { row, columns in
            columns.update(repeating: AdditiveMask.hidden)
            guard row < tree.count else {
                columns[context + row] = AdditiveMask.visible
                return
            }
            columns[..<length].update(repeating: AdditiveMask.visible)
            var node = row
            while node >= 0 {
                columns[context + node] = AdditiveMask.visible
                node = tree.parents[node]
            }
        }
    }

    private func padded(_ values: [Int], _ filler: Int) -> [Int32] {
        (0..<size).map { Int32($0 < values.count ? values[$0] : filler) }
    }
}

/// The inputs of a prefill function, in memory that every chunk reuses.
package final class PrefillInputs<Memory: InputArray> {
    private let chunk: Int
    private let context: Int
    private var tokens: Memory
    private var position: Memory
    private var mask: Memory

    package init(chunk: Int, context: Int) throws {
        self.chunk = chunk
        self.context = context
        tokens = try Memory(zeros: [1, chunk], .int32)
        position = try Memory(zeros: [1], .int32)
        mask = try Memory(zeros: [chunk, context + chunk], .float16)
    }

    /// The inputs by name.
    package var arrays: [String: Memory] { ["tokens": tokens, "position": position, "mask": mask] }

    /// Fills all inputs for up to `chunk` prompt tokens behind `length` committed positions.
    package func fill(_ part: ArraySlice<Int>, length: Int) {
        let padding = repeatElement(part[part.endIndex - 1], count: chunk - part.count)
        tokens.write((Array(part) + padding).map { Int32($0) })
        position.write([Int32(length)])
        let context = context
        mask.writeHalfRows { row, columns in
            columns.update(repeating: AdditiveMask.hidden)
            columns[..<length].update(repeating: AdditiveMask.visible)
            columns[context...(context + row)].update(repeating: AdditiveMask.visible)
        }
    }
}
