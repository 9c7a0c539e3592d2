import CoreML
import Foundation
import SpeculativeStreaming
import Testing

@testable import SpeculativeStreamingCoreML

/// The step function's inputs as the Python step model hands them over, pending commits included.
@Suite struct StepInputTests {
    private let file: TensorFile
    private let rows: Int

    init() throws {
        let url = try #require(
            Bundle.module.url(forResource: "inputs", withExtension: "safetensors", subdirectory: "Resources"))
        file = try TensorFile(contentsOf: url)
        rows = try file.integers("length").count
    }

    private func ints(_ name: String, _ row: Int) throws -> [Int] {
        let counts = try file.integers(name + ".count")
        let start = counts[..<row].reduce(0, +)
        return Array(try file.integers(name)[start..<start + counts[row]])
    }

    @Test func everyInputIsTheRecordedOne() throws {
        #expect(rows == 20)
        for row in 0..<rows {
            let limits = try ints("limits", row)
            let inputs = try StepInputs(
                StepLimits(numNodes: limits[0], numKept: limits[1], numStreams: 2, context: limits[2]), gated: false)
            let tree = DraftTree(tokens: try ints("tree_tokens", row), parents: try ints("tree_parents", row))
            // What an earlier, larger tree left behind must not shine through.
            let chain = DraftTree(tokens: Array(0..<limits[0]), parents: Array(-1..<limits[0] - 1))
            inputs.fill(chain, length: limits[2], pending: PendingCommit(slot: 9, nodes: [0, 1, 2], rows: [0, 1, 2]))
            let pending = PendingCommit(
                slot: try ints("slot", row)[0], nodes: try ints("nodes", row), rows: try ints("rows", row))
            inputs.fill(tree, length: try ints("length", row)[0], pending: pending)
            for name in ["tokens", "positions", "parents", "commit_position", "commit_nodes", "commit_rows"] {
                let found = try inputs.features.featureValue(for: name)?.multiArrayValue?.readIntegers()
                #expect(try found ?? [] == ints("input_" + name, row), "\(name) of case \(row)")
            }
            try expectMask(inputs, row)
        }
    }

    private func expectMask(_ inputs: StepInputs, _ row: Int) throws {
        let mask = try #require(inputs.features.featureValue(for: "mask")?.multiArrayValue)
        let values = try mask.readLogits().values
        let bits = try ints("mask", row).flatMap { byte in (0..<8).map { byte >> (7 - $0) & 1 == 1 } }
        #expect(values.map { $0 == 0 } == Array(bits.prefix(values.count)), "mask of case \(row)")
        #expect(values.allSatisfy { $0 == 0 || $0 == -10_000 })
    }
}
