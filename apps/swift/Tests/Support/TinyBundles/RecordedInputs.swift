import Foundation
import SpeculativeStreaming

/// The step function's inputs as the Python step model hands them over, pending commits included.
package struct RecordedInputs {
    /// One step: what is filled in, and the inputs that come of it.
    package struct Case {
        package let limits: StepLimits
        package let tree: DraftTree
        package let length: Int
        package let pending: PendingCommit
        /// Integers of every input but the mask; `commit_rows` empty where the function takes none.
        package let integers: [String: [Int]]
        /// Whether the mask shows, row by row.
        package let shows: [Bool]
    }

    package let cases: [Case]

    package init() throws {
        let name = "inputs.safetensors"
        guard let url = Bundle.module.url(forResource: name, withExtension: nil, subdirectory: "Resources") else {
            throw SpeculativeError.missingFile(path: "Resources/\(name)")
        }
        let file = try TensorFile(contentsOf: url)
        func ints(_ name: String, _ row: Int) throws -> [Int] {
            let counts = try file.integers(name + ".count")
            let start = counts[..<row].reduce(0, +)
            return Array(try file.integers(name)[start..<start + counts[row]])
        }
        cases = try (0..<file.integers("length").count).map { row in
            let limits = try ints("limits", row)
            let names = ["tokens", "positions", "parents", "commit_position", "commit_nodes", "commit_rows"]
            let shows = try ints("mask", row).flatMap { byte in (0..<8).map { byte >> (7 - $0) & 1 == 1 } }
            return Case(
                limits: StepLimits(numNodes: limits[0], numKept: limits[1], numStreams: 2, context: limits[2]),
                tree: DraftTree(tokens: try ints("tree_tokens", row), parents: try ints("tree_parents", row)),
                length: try ints("length", row)[0],
                pending: PendingCommit(
                    slot: try ints("slot", row)[0], nodes: try ints("nodes", row), rows: try ints("rows", row)),
                integers: Dictionary(uniqueKeysWithValues: try names.map { ($0, try ints("input_" + $0, row)) }),
                shows: Array(shows.prefix(limits[0] * (limits[2] + limits[0]))))
        }
    }

    /// The inputs of every case, in memory where an earlier, larger tree left something behind that must not shine
    /// through.
    package func filled<Memory: InputArray>(_ number: Int, _: Memory.Type) throws -> StepInputs<Memory> {
        let (limits, size) = (cases[number].limits, cases[number].limits.numNodes)
        let inputs = try StepInputs<Memory>(limits, gated: false)
        inputs.fill(
            DraftTree(tokens: Array(0..<size), parents: Array(-1..<size - 1)), length: limits.context,
            pending: PendingCommit(slot: 9, nodes: [0, 1, 2], rows: [0, 1, 2]))
        inputs.fill(cases[number].tree, length: cases[number].length, pending: cases[number].pending)
        return inputs
    }
}
