import Foundation

/// What replaying golden traces on a model found (`ss-validate` does the same on the Python side).
public struct ReplayReport: Sendable, Codable, Equatable {
    public var prompts = 0
    /// Prompts with every token on the accepted path as recorded.
    public var tokenExact = 0
    public var steps = 0
    public var nodes = 0
    /// Nodes where another token was chosen than recorded, and how many of them were near ties of the
    /// reference: margin up to twice the largest difference seen in a stream logit.
    public var differences = 0
    public var nearTies = 0
    public var maxLogitDifference: Float = 0
    /// 20·log10(largest |recorded logit| / root mean square difference) over all probes, in dB; nil when equal.
    public var psnr: Double?
    /// Generated tokens but the first, per recorded call.
    public var tokensPerCall: Double?
}

/// Replays recorded trees: every tree is fed as it was and the recorded path committed, so one differing token
/// does not hide what comes after it.
public struct Replay {
    private let model: any StepModel
    private var report = ReplayReport()
    private var margins: [Float] = []
    private var squaredDifference = 0.0
    private var probes = 0
    private var largest: Float = 0

    public init(model: any StepModel) { self.model = model }

    /// Replays `traces`, at most `maxSteps` steps of each. Throws when one does not fit the model.
    public mutating func run(
        _ traces: [Trace], maxSteps: Int? = nil, isolation: isolated (any Actor)? = #isolation
    ) async throws -> ReplayReport {
        var tokens = 0
        for trace in traces {
            try check(trace)
            let isExact = try await replay(trace, maxSteps: maxSteps, isolation: isolation)
            report.prompts += 1
            report.tokenExact += isExact ? 1 : 0
            tokens += trace.generated.count - 1
        }
        let recorded = traces.reduce(0) { $0 + $1.steps.count }
        if recorded > 0 { report.tokensPerCall = Double(tokens) / Double(recorded) }
        report.differences = margins.count
        report.nearTies = margins.count { $0 <= 2 * report.maxLogitDifference }
        if squaredDifference > 0 {
            let rms = (squaredDifference / Double(probes)).squareRoot()
            report.psnr = 20 * log10(Double(largest) / rms)
        }
        return report
    }

    private func check(_ trace: Trace) throws {
        let nodes = trace.steps.map(\.tree.count).max() ?? 1
        guard nodes <= model.limits.numNodes else {
            throw SpeculativeError.tooManyNodes(requested: nodes, limit: model.limits.numNodes)
        }
        let length = trace.prompt.count + trace.generated.count - 1
        guard length <= model.limits.context else {
            throw SpeculativeError.promptTooLong(tokens: length, context: model.limits.context)
        }
    }

    private mutating func replay(
        _ trace: Trace, maxSteps: Int?, isolation: isolated (any Actor)?
    ) async throws -> Bool {
        let proposal = try await model.prefill(trace.prompt, keeping: 0, isolation: isolation)
        var isExact = proposal.root == trace.generated.first
        if !isExact { margins.append(trace.firstMargin) }
        for step in trace.steps.prefix(maxSteps ?? .max) {
            try checkCancellation()
            let verified = try await model.step(step.tree, isolation: isolation)
            if !compareNodes(step, verified) { isExact = false }
            compareStreams(step, verified)
            report.steps += 1
            // Half precision may prune another node; without the recorded path the prompt cannot go on.
            guard Set(step.path).isSubset(of: verified.kept) else { return false }
            try model.commit(step.path)
        }
        return isExact
    }

    /// Whether all tokens on the recorded path are as recorded.
    private mutating func compareNodes(_ step: TraceStep, _ verified: Verified) -> Bool {
        let chosen = Dictionary(uniqueKeysWithValues: zip(verified.kept, verified.chosen))
        var pathIsExact = true
        for (row, node) in step.kept.enumerated() {
            guard let found = chosen[node] else { continue }
            report.nodes += 1
            guard found != step.chosen[row] else { continue }
            margins.append(step.margins[row])
            if step.path.contains(node) { pathIsExact = false }
        }
        return pathIsExact
    }

    private mutating func compareStreams(_ step: TraceStep, _ verified: Verified) {
        guard verified.acceptedNode == step.path.last, verified.streamLogits.rows > 0 else { return }
        let perStream = step.probeIDs.count / verified.streamLogits.rows
        for (index, (id, expected)) in zip(step.probeIDs, step.probeLogits).enumerated() {
            let row = index / perStream
            let found = verified.streamLogits.values[row * verified.streamLogits.vocabulary + id]
            let difference = abs(found - expected)
            report.maxLogitDifference = max(report.maxLogitDifference, difference)
            squaredDifference += Double(difference * difference)
            largest = max(largest, abs(expected))
            probes += 1
        }
    }
}
