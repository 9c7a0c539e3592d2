public enum FinishReason: String, Sendable, Codable {
    /// An end token or a stop string.
    case stop
    /// The token limit or the end of the context.
    case length
}

/// One model call's outcome. The prefill's has no tree: its one token is the first root.
public struct DecodingStep: Sendable {
    /// Tokens emitted by this call; `numDrafted` of them, from the front, were accepted draft tokens.
    public let tokens: [Int]
    public let numDrafted: Int
    public let tree: DraftTree?
    public let path: [Int]
    public let finishReason: FinishReason?
}

/// What a generation is asked for.
public struct DecodingRequest: Sendable {
    public var prompt: [Int]
    public var maxTokens: Int
    public var stopIDs: Set<Int>
    public var sampler: Sampler
    /// Keep what the model holds of the prompt's beginning from the text before.
    public var reusesText: Bool

    public init(
        prompt: [Int], maxTokens: Int, stopIDs: Set<Int> = [], sampler: Sampler = .greedy, reusesText: Bool = false
    ) {
        self.prompt = prompt
        self.maxTokens = maxTokens
        self.stopIDs = stopIDs
        self.sampler = sampler
        self.reusesText = reusesText
    }

    /// Throws the error that names what does not fit the model's limits.
    public func check(_ limits: StepLimits, numNodes: Int) throws {
        guard numNodes <= limits.numNodes else {
            throw SpeculativeError.tooManyNodes(requested: numNodes, limit: limits.numNodes)
        }
        guard !prompt.isEmpty else { throw SpeculativeError.emptyPrompt }
        guard prompt.count <= limits.context else {
            throw SpeculativeError.promptTooLong(tokens: prompt.count, context: limits.context)
        }
        guard maxTokens >= 1 else {
            throw SpeculativeError.invalidSetting("max tokens must be at least 1, not \(maxTokens)")
        }
    }
}

/// The decoding loop: propose → step → accept → commit, over any step model, one call of `next` per model
/// call. The text ends with a stop id (included), after `maxTokens`, or when the context is full.
public struct DecodingLoop {
    private let model: any StepModel
    private let drafter: Drafter
    private let request: DecodingRequest
    private var left: Int
    /// Committed positions; the root sits at this one.
    private var length = 0
    private var root = 0
    private var draft: LogitRows?
    private var started = false
    public private(set) var finishReason: FinishReason?
    /// Tokens of the prompt that were kept from the text before.
    public private(set) var keptTokens = 0

    /// Throws when the request does not fit the model.
    public init(model: any StepModel, drafter: Drafter, request: DecodingRequest) throws {
        try request.check(model.limits, numNodes: drafter.numNodes)
        self.model = model
        self.drafter = drafter
        self.request = request
        // The cache holds every token but the newest one, so context - prompt + 1 can be generated.
        left = min(request.maxTokens, model.limits.context - request.prompt.count + 1)
        model.wantsLogits = request.sampler != .greedy
    }

    /// The next call's outcome, nil after the one with a finish reason.
    public mutating func next(isolation: isolated (any Actor)? = #isolation) async throws -> DecodingStep? {
        guard finishReason == nil else { return nil }
        return started ? try await step(isolation) : try await prefill(isolation)
    }

    private mutating func prefill(_ isolation: isolated (any Actor)?) async throws -> DecodingStep {
        started = true
        keptTokens = request.reusesText ? model.reusable(request.prompt) : 0
        let proposal = try await model.prefill(request.prompt, keeping: keptTokens, isolation: isolation)
        length = request.prompt.count
        root = try firstToken(proposal)
        draft = proposal.streamLogits
        let emitted = trim([root])
        return DecodingStep(tokens: emitted, numDrafted: 0, tree: nil, path: [], finishReason: finishReason)
    }

    private mutating func step(_ isolation: isolated (any Actor)?) async throws -> DecodingStep {
        let tree = drafter.grow(
            root: root, streamLogits: draft, stopIDs: request.stopIDs, maxDepth: left - 1)
        let verified = try await model.step(tree, isolation: isolation)
        let accepted = try accept(tree, verified)
        draft = try nextDraft(accepted, verified)
        let emitted = trim(accepted.nodes.dropFirst().map { tree.tokens[$0] } + [accepted.correction])
        try model.commit(accepted.nodes)
        length += accepted.nodes.count
        root = accepted.correction
        return DecodingStep(
            tokens: emitted, numDrafted: min(emitted.count, accepted.nodes.count - 1), tree: tree,
            path: accepted.nodes, finishReason: finishReason)
    }

    private func firstToken(_ proposal: Proposal) throws -> Int {
        guard case .sampling(let sampling) = request.sampler else { return proposal.root }
        guard let logits = proposal.logits else { throw SpeculativeError.noLogits }
        return logits.withRow(0) { sampling.choose($0, position: length) }
    }

    /// The walk with the request's sampler; a greedy one must end where the graph's own did.
    private func accept(_ tree: DraftTree, _ verified: Verified) throws -> AcceptedPath {
        switch request.sampler {
        case .greedy:
            let path = walk(tree, kept: verified.kept) { verified.chosen[$0] }
            guard path.nodes.last == verified.acceptedNode else {
                throw SpeculativeError.walkMismatch(model: verified.acceptedNode, host: path.nodes.last ?? 0)
            }
            return path
        case .sampling(let sampling):
            guard let logits = verified.logits else { throw SpeculativeError.noLogits }
            // The token at a node of depth d follows the committed text, the root and d more.
            return walk(tree, kept: verified.kept) { row in
                let position = length + tree.depths[verified.kept[row]] + 1
                return logits.withRow(row) { sampling.choose($0, position: position) }
            }
        }
    }

    private func nextDraft(_ accepted: AcceptedPath, _ verified: Verified) throws -> LogitRows? {
        let last = accepted.nodes[accepted.nodes.count - 1]
        return last == verified.acceptedNode ? verified.streamLogits : try model.streamLogits(ofNode: last)
    }

    /// Cuts after the first stop id and at the token limit, and notes the reason if either ended the text.
    private mutating func trim(_ tokens: [Int]) -> [Int] {
        var emitted = Array(tokens.prefix(left))
        if let stop = emitted.firstIndex(where: request.stopIDs.contains) {
            emitted.removeLast(emitted.count - stop - 1)
            finishReason = .stop
        } else if tokens.count >= left {
            finishReason = .length
        }
        left -= emitted.count
        return emitted
    }
}
