import Foundation
import SpeculativeStreaming
import SpeculativeStreamingCoreML

/// The host's own time per step: tree, mask and walk on random logits, no model.
///
/// Processor time of the thread, so that other programs on the same core do not count.
struct HostBenchmark {
    struct Timing: Encodable {
        var minimum = 0.0
        var median = 0.0
    }

    struct Report: Encodable {
        let logits: String
        let bigramRank: Int
        let nodes: Int
        let vocabulary: Int
        let streams = 4
        let repetitions: Int
        let milliseconds: [String: Timing]
    }

    private let arguments: Arguments
    private let context = 2048
    private let repetitions = 200

    init(_ arguments: Arguments) { self.arguments = arguments }

    func run() throws {
        for (name, spread) in [("flat", Float(2)), ("peaked", Float(6))] {
            for rank in [0, 32] {
                let report = try measure(name, spread: spread, rank: rank)
                if arguments.json {
                    try printJSON(report)
                } else {
                    show(report)
                }
            }
        }
    }

    private func measure(_ name: String, spread: Float, rank: Int) throws -> Report {
        let nodes = arguments.nodes ?? 32
        var noise = Noise(state: 7)
        let rows = (0..<8).map { _ in logits(spread, &noise) }
        let drafter = try Drafter(numNodes: nodes, bigramBias: bias(rank, &noise))
        let limits = StepLimits(numNodes: nodes, numKept: nodes, numStreams: 4, context: context)
        let inputs = try StepInputs<MultiArrayInput>(limits, gated: false)
        var times: [String: [Double]] = [:]
        for repetition in 0..<repetitions {
            var tree = DraftTree.rootOnly(0)
            let growing = Self.seconds {
                tree = drafter.grow(root: repetition % arguments.vocabulary, streamLogits: rows[repetition % 8])
            }
            let length = 200 + repetition % 1000
            let masking = Self.seconds {
                inputs.fill(tree, length: length, pending: PendingCommit(slot: length - 3, nodes: [0, 1, 2], rows: [0, 1, 2]))
            }
            // The model agrees along the path to the deepest node.
            let chosen = agreement(tree)
            var accepted = AcceptedPath(nodes: [], correction: 0)
            let walking = Self.seconds { accepted = walk(tree, kept: Array(0..<tree.count)) { chosen[$0] } }
            precondition(accepted.nodes.count > 1 || tree.count == 1, "the walk follows what the model agreed to")
            let parts = ["tree": growing, "inputs and mask": masking, "walk": walking]
            for (part, time) in parts { times[part, default: []].append(1000 * time) }
            times["step", default: []].append(1000 * (growing + masking + walking))
        }
        let timings = times.mapValues { values in
            let sorted = values.sorted()
            return Timing(minimum: sorted[0], median: sorted[sorted.count / 2])
        }
        return Report(
            logits: name, bigramRank: rank, nodes: nodes, vocabulary: arguments.vocabulary,
            repetitions: repetitions, milliseconds: timings)
    }

    private func show(_ report: Report) {
        let bias = report.bigramRank == 0 ? "no bigram bias" : "bigram bias of rank \(report.bigramRank)"
        print("\(report.nodes) nodes, vocabulary \(report.vocabulary), \(report.logits) logits, \(bias):")
        for (part, time) in report.milliseconds.sorted(by: { $0.key < $1.key }) {
            print("  " + part.padding(toLength: 16, withPad: " ", startingAt: 0)
                + String(format: "minimum %.4f ms, median %.4f ms", time.minimum, time.median))
        }
    }

    /// Normal numbers (sum of uniforms) of the given spread.
    private func logits(_ spread: Float, _ noise: inout Noise) -> LogitRows {
        let values = (0..<4 * arguments.vocabulary).map { _ in noise.normal() * spread }
        return LogitRows(rows: 4, vocabulary: arguments.vocabulary, values: values)
    }

    private func bias(_ rank: Int, _ noise: inout Noise) -> BigramBias? {
        guard rank > 0 else { return nil }
        let count = arguments.vocabulary * rank
        let u = (0..<count).map { _ in noise.normal() }
        let v = (0..<count).map { _ in noise.normal() * 0.2 }
        return BigramBias(u: u, v: v, rank: rank)
    }

    private func agreement(_ tree: DraftTree) -> [Int] {
        var chosen = [Int](repeating: -1, count: tree.count)
        let deepest = tree.depths.indices.max { tree.depths[$0] < tree.depths[$1] } ?? 0
        for node in tree.path(to: deepest).dropFirst() { chosen[tree.parents[node]] = tree.tokens[node] }
        return chosen
    }

    /// Processor seconds that `body` takes on this thread.
    private static func seconds(_ body: () -> Void) -> Double {
        let start = threadNanoseconds()
        body()
        return Double(threadNanoseconds() - start) * 1e-9
    }

    private struct Noise {
        var state: UInt64

        mutating func uniform() -> Float {
            state = state &* 6_364_136_223_846_793_005 &+ 1_442_695_040_888_963_407
            return Float(state >> 40) * 0x1p-24
        }

        mutating func normal() -> Float {
            (0..<6).reduce(Float(-3)) { sum, _ in sum + uniform() } * 1.414
        }
    }
}

/// Processor time of this thread in nanoseconds.
private func threadNanoseconds() -> Int {
    var time = timespec()
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time)
    return Int(time.tv_sec) * 1_000_000_000 + Int(time.tv_nsec)
}
