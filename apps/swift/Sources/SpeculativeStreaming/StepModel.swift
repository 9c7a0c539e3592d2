/// What a step model takes: nodes per step N, nodes kept K, streams γ, context C in tokens.
public struct StepLimits: Sendable, Equatable {
    public let numNodes: Int
    public let numKept: Int
    public let numStreams: Int
    public let context: Int

    public init(numNodes: Int, numKept: Int, numStreams: Int, context: Int) {
        self.numNodes = numNodes
        self.numKept = numKept
        self.numStreams = numStreams
        self.context = context
    }
}

/// What a prefill or an accepted step hands to the next draft.
public struct Proposal: Sendable {
    /// The next root token as the model chose it (greedily).
    public let root: Int
    /// Stream logits [γ, V] of the position that decided the root; nil where a back end has none there.
    public let streamLogits: LogitRows?
    /// Main logits [1, V] at that position, where a back end returns them.
    public let logits: LogitRows?

    public init(root: Int, streamLogits: LogitRows?, logits: LogitRows? = nil) {
        self.root = root
        self.streamLogits = streamLogits
        self.logits = logits
    }
}

/// What one model call says of a tree.
public struct Verified: Sendable {
    /// Ascending ids of the nodes that survived pruning [K'], all of the tree's without it.
    public let kept: [Int]
    /// The model's own greedy token at each kept node [K'].
    public let chosen: [Int]
    /// The node where the greedy walk ends.
    public let acceptedNode: Int
    /// Stream logits [γ, V] of `acceptedNode`.
    public let streamLogits: LogitRows
    /// Main logits [K', V], where a back end returns them; sampling needs them.
    public let logits: LogitRows?

    public init(kept: [Int], chosen: [Int], acceptedNode: Int, streamLogits: LogitRows, logits: LogitRows? = nil) {
        self.kept = kept
        self.chosen = chosen
        self.acceptedNode = acceptedNode
        self.streamLogits = streamLogits
        self.logits = logits
    }
}

/// The one contract of every back end (ARCHITECTURE.md: StepModel). A single sequence, one step in flight.
///
/// `SpeculativeGenerator` confines a model to its actor, so a back end needs no locks and need not be `Sendable`.
/// Calls may wait for the model (Core AI's functions are asynchronous). `isolation` is the caller's actor, on which
/// they run, as in `AsyncIteratorProtocol.next(isolation:)`.
public protocol StepModel: AnyObject {
    var limits: StepLimits { get }

    /// Whether `logits` are asked for: a vocabulary per kept node is worth copying only for sampling.
    var wantsLogits: Bool { get set }

    /// How many of the first tokens a prefill could keep from the text before; never all of them.
    func reusable(_ tokens: [Int]) -> Int

    /// Takes the prompt's tokens, returns the first root and draft. Forgets everything but the first `kept` tokens,
    /// of which there may be up to `reusable(tokens)`.
    func prefill(
        _ tokens: [Int], keeping kept: Int, isolation: isolated (any Actor)?
    ) async throws -> Proposal

    /// Verifies a tree of at most `limits.numNodes` nodes. Changes nothing until `commit`.
    func step(_ tree: DraftTree, isolation: isolated (any Actor)?) async throws -> Verified

    /// Keeps the keys and values of these nodes (root first) of the last tree, drops the others.
    func commit(_ path: [Int]) throws

    /// Stream logits [γ, V] of a node of the last step, nil where the back end computed none for it.
    ///
    /// Asked before `commit` when a sampled walk ends elsewhere than the greedy one.
    func streamLogits(ofNode node: Int) throws -> LogitRows?
}

extension StepModel {
    public func reusable(_ tokens: [Int]) -> Int { 0 }
    public func streamLogits(ofNode node: Int) throws -> LogitRows? { nil }
}
