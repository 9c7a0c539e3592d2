import Foundation
import Testing

@testable import SpeculativeStreaming

/// Rows of one file that `tests/swift/export_traces.py` wrote.
struct Recorded {
    private let file: TensorFile
    private let starts: [String: [Int]]
    private let integers: [String: [Int]]
    private let floats: [String: [Float]]
    private let doubles: [String: [Double]]

    init(_ name: String, in bundle: Bundle = .module) throws {
        let url = try #require(
            bundle.url(forResource: name, withExtension: "safetensors", subdirectory: "Resources"))
        file = try TensorFile(contentsOf: url)
        var (starts, integers) = ([String: [Int]](), [String: [Int]]())
        var (floats, doubles) = ([String: [Float]](), [String: [Double]]())
        for name in file.names where !name.hasSuffix(".count") {
            starts[name] = try file.integers(name + ".count").reduce(into: [0]) { $0.append($0[$0.count - 1] + $1) }
            if let found = try? file.integers(name) {
                integers[name] = found
            } else if let found = try? file.doubles(name) {
                doubles[name] = found
            } else {
                floats[name] = try file.floats(name)
            }
        }
        (self.starts, self.integers, self.floats, self.doubles) = (starts, integers, floats, doubles)
    }

    func rows(_ name: String) -> Int { (starts[name]?.count ?? 1) - 1 }

    func ints(_ name: String, _ row: Int) -> [Int] { cut(integers, name, row) }

    func int(_ name: String, _ row: Int) -> Int { ints(name, row)[0] }

    func floats(_ name: String, _ row: Int) -> [Float] { cut(floats, name, row) }

    func doubles(_ name: String, _ row: Int) -> [Double] { cut(doubles, name, row) }

    private func cut<Number>(_ all: [String: [Number]], _ name: String, _ row: Int) -> [Number] {
        guard let starts = starts[name], let numbers = all[name] else { return [] }
        return Array(numbers[starts[row]..<starts[row + 1]])
    }
}

/// Logits of a key: 14·u⁴ of 24-bit uniforms, or whole numbers 0 … 7 with many ties.
func hashLogits(key: UInt64, rows: Int, vocabulary: Int, ties: Bool = false) -> LogitRows {
    let values = (0..<rows * vocabulary).map { index -> Float in
        let mixed = splitmix64(key ^ splitmix64(UInt64(index)))
        if ties { return Float(mixed >> 61) }
        let u = Float(mixed >> 40) * 0x1p-24
        return (u * u) * (u * u) * 14
    }
    return LogitRows(rows: rows, vocabulary: vocabulary, values: values)
}

/// u and v [V, rank] of a key.
func hashFactors(key: UInt64, vocabulary: Int, rank: Int) -> (u: [Float], v: [Float]) {
    let factors = [key &+ 1, key &+ 2].map { key in
        (0..<vocabulary * rank).map { Float(splitmix64(key ^ splitmix64(UInt64($0))) >> 40) * 0x1p-23 - 1 }
    }
    return (factors[0], factors[1])
}

/// The bigram bias of a key, nil for rank 0.
func hashBias(key: UInt64, vocabulary: Int, rank: Int) -> BigramBias? {
    guard rank > 0 else { return nil }
    let factors = hashFactors(key: key, vocabulary: vocabulary, rank: rank)
    return BigramBias(u: factors.u, v: factors.v, rank: rank)
}

/// Shapes by the number the exporter gives them.
let recordedShapes: [Drafter.Shape] = [.bestFirst, .chain, .kAry]

/// A step model whose logits are a formula of the last two tokens: the same as in the exporter.
final class HashModel: StepModel {
    let limits: StepLimits
    var wantsLogits = false
    private let key: UInt64
    private let vocabulary: Int
    private(set) var text: [Int] = []
    private var tree = DraftTree.rootOnly(0)
    /// Called before every model call.
    var beforeCall: () throws -> Void = {}

    init(key: UInt64, vocabulary: Int, limits: StepLimits) {
        self.key = key
        self.vocabulary = vocabulary
        self.limits = limits
    }

    func prefill(
        _ tokens: [Int], keeping kept: Int, isolation: isolated (any Actor)?
    ) async throws -> Proposal {
        text = [0] + tokens.dropLast()
        let verified = try await step(.rootOnly(tokens[tokens.count - 1]), isolation: isolation)
        try commit([0])
        return Proposal(root: verified.chosen[0], streamLogits: verified.streamLogits, logits: verified.logits)
    }

    func step(_ tree: DraftTree, isolation: isolated (any Actor)?) async throws -> Verified {
        try beforeCall()
        self.tree = tree
        let logits = (0..<tree.count).map { main(state($0)) }
        let chosen = logits.map { $0.argmax(0) }
        let kept = Array(0..<tree.count)
        let acceptedNode = walk(tree, kept: kept) { chosen[$0] }.nodes.last ?? 0
        let all = LogitRows(rows: tree.count, vocabulary: vocabulary, values: logits.flatMap(\.values))
        return Verified(
            kept: kept, chosen: chosen, acceptedNode: acceptedNode, streamLogits: streams(state(acceptedNode)),
            logits: wantsLogits ? all : nil)
    }

    func commit(_ path: [Int]) throws { text += path.map { tree.tokens[$0] } }

    func streamLogits(ofNode node: Int) throws -> LogitRows? { streams(state(node)) }

    /// The last two tokens at a node.
    private func state(_ node: Int) -> (before: Int, last: Int) {
        let path = text.suffix(1) + tree.path(to: node).map { tree.tokens[$0] }
        return (path[path.endIndex - 2], path[path.endIndex - 1])
    }

    private func main(_ state: (before: Int, last: Int)) -> LogitRows {
        let own = key &+ 1_000_003 &* UInt64(state.before) &+ UInt64(state.last)
        return hashLogits(key: own, rows: 1, vocabulary: vocabulary)
    }

    private func streams(_ state: (before: Int, last: Int)) -> LogitRows {
        var (state, values) = (state, [Float]())
        for stream in 0..<limits.numStreams {
            state = (state.last, main(state).argmax(0))
            let own = key &+ 17 &+ UInt64(stream) &+ 31 &* UInt64(state.last)
            let noise = hashLogits(key: own, rows: 1, vocabulary: vocabulary)
            values += zip(main(state).values, noise.values).map { $0 + 0.5 * $1 }
        }
        return LogitRows(rows: limits.numStreams, vocabulary: vocabulary, values: values)
    }
}
