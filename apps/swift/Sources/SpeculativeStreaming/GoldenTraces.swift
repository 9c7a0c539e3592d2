import Foundation

/// One recorded model call of the reference (`ss_device/trace.py`).
public struct TraceStep: Sendable {
    public let tree: DraftTree
    public let kept: [Int]
    public let chosen: [Int]
    /// Top-1 minus top-2 logit at each kept node.
    public let margins: [Float]
    public let path: [Int]
    /// Vocabulary ids [γ × P] and the accepted node's stream logits there.
    public let probeIDs: [Int]
    public let probeLogits: [Float]
}

/// One prompt's generation as the reference recorded it.
public struct Trace: Sendable {
    public let text: String
    public let prompt: [Int]
    public let generated: [Int]
    public let firstMargin: Float
    public let steps: [TraceStep]
}

/// Reads the golden traces of a bundle.
public enum GoldenTraces {
    public static let formatVersion = 1

    /// Traces of `<stem>.json` and `<stem>.safetensors`. Throws for a missing, damaged or newer file.
    public static func load(stem: URL) throws -> [Trace] {
        let counts = try readCounts(stem)
        var reader = try TraceReader(stem.appendingPathExtension("safetensors"), counts)
        return try reader.traces()
    }

    private static func readCounts(_ stem: URL) throws -> Counts {
        let file = stem.appendingPathExtension("json")
        guard let data = try? Data(contentsOf: file) else { throw SpeculativeError.missingFile(path: file.path) }
        let counts: Counts
        do {
            let decoder = JSONDecoder()
            decoder.keyDecodingStrategy = .convertFromSnakeCase
            counts = try decoder.decode(Counts.self, from: data)
        } catch let error as DecodingError {
            throw SpeculativeError.damagedFile(path: file.path, reason: oneLine(error))
        }
        guard counts.formatVersion == formatVersion else {
            throw SpeculativeError.unsupportedFormat(
                path: file.path, found: counts.formatVersion, supported: formatVersion)
        }
        return counts
    }

    fileprivate struct Counts: Decodable {
        struct Prompt: Decodable {
            let text: String
            let promptTokens: Int
            let generatedTokens: Int
            let firstMargin: Float
            let steps: Int
        }

        struct Sizes: Decodable {
            let nodes: Int
            let kept: Int
            let path: Int
        }

        let formatVersion: Int
        let prompts: [Prompt]
        let steps: [Sizes]
        let recorded: Recorded?
    }

    /// Where traces were recorded. `weights`: digest of the bundle's weights, as `SpeculativeBundle.weightsDigest`;
    /// empty for the traces inside a bundle.
    public struct Recorded: Decodable, Sendable, Equatable {
        public let device: String
        public let dtype: String
        public let weights: String
    }

    /// Where the traces of a file were recorded, nil where it does not say. Throws `missingFile` or `damagedFile`.
    public static func origin(stem: URL) throws -> Recorded? { try readCounts(stem).recorded }
}

/// Cuts the concatenated arrays of a trace file into steps.
private struct TraceReader {
    private let counts: GoldenTraces.Counts
    private let path: String
    private var integers: [String: [Int]] = [:]
    private let margins: [Float]
    private let probeLogits: [Float]
    private var taken: [String: Int] = [:]

    init(_ file: URL, _ counts: GoldenTraces.Counts) throws {
        let tensors = try TensorFile(contentsOf: file)
        for name in ["prompts", "generated", "tree_tokens", "tree_parents", "kept", "chosen", "paths", "probe_ids"] {
            integers[name] = try tensors.integers(name)
        }
        margins = try tensors.floats("margins")
        probeLogits = try tensors.floats("probe_logits")
        self.counts = counts
        path = file.path
    }

    mutating func traces() throws -> [Trace] {
        var sizes = counts.steps[...]
        let probes = counts.steps.isEmpty ? 0 : probeLogits.count / counts.steps.count
        return try counts.prompts.map { prompt in
            let steps = try (0..<prompt.steps).map { _ in
                guard let size = sizes.popFirst() else { throw damaged }
                return try step(size, probes)
            }
            return Trace(
                text: prompt.text, prompt: try take("prompts", prompt.promptTokens),
                generated: try take("generated", prompt.generatedTokens), firstMargin: prompt.firstMargin,
                steps: steps)
        }
    }

    private mutating func step(_ size: GoldenTraces.Counts.Sizes, _ probes: Int) throws -> TraceStep {
        let tree = DraftTree(
            tokens: try take("tree_tokens", size.nodes), parents: try take("tree_parents", size.nodes))
        let kept = try take("kept", size.kept)
        let chosen = try take("chosen", size.kept)
        let end = taken["kept"] ?? 0  // margins run along with the kept nodes
        let probeIDs = try take("probe_ids", probes)
        let probeEnd = taken["probe_ids"] ?? 0
        guard end <= margins.count, probeEnd <= probeLogits.count else { throw damaged }
        return TraceStep(
            tree: tree, kept: kept, chosen: chosen, margins: Array(margins[(end - size.kept)..<end]),
            path: try take("paths", size.path), probeIDs: probeIDs,
            probeLogits: Array(probeLogits[(probeEnd - probes)..<probeEnd]))
    }

    private mutating func take(_ name: String, _ count: Int) throws -> [Int] {
        let start = taken[name] ?? 0
        guard let all = integers[name], start + count <= all.count else { throw damaged }
        taken[name] = start + count
        return Array(all[start..<start + count])
    }

    private var damaged: SpeculativeError {
        .damagedFile(path: path, reason: "fewer numbers than the trace's counts say")
    }
}
