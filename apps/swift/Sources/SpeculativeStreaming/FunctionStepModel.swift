/// How a back end runs an adapter's prefill and step functions, and the cache of one sequence that they share.
package protocol FunctionCalls: AnyObject {
    associatedtype Outputs: StepOutputs

    /// Whether a step moves the accepted rows of the step before; else `commit` is called instead.
    var movesRows: Bool { get }

    /// Computes and commits the keys and values of up to a chunk of tokens behind `length` committed positions.
    func prefill(_ part: ArraySlice<Int>, length: Int, isolation: isolated (any Actor)?) async throws

    /// Runs a tree below `length` committed positions. Its outputs hold until the next step.
    func step(
        _ tree: DraftTree, length: Int, pending: PendingCommit, isolation: isolated (any Actor)?
    ) async throws -> Outputs

    /// Writes the accepted rows of the last step to their slots.
    func commit(_ accepted: PendingCommit) throws
}

/// What a step function put out. Throws `backEnd` for an output that is not there or of another kind.
package protocol StepOutputs {
    func integers(_ name: String) throws -> [Int]

    /// The first `rows` rows of a matrix, nil for all; of an array of matrices those of number `block`.
    func logits(_ name: String, rows: Int?, block: Int) throws -> LogitRows

    /// Whether `stream_logits` are those of every kept node [K, γ, V] rather than of the accepted one [γ, V].
    func hasStreamsOfEveryNode() throws -> Bool
}

/// The part of a `StepModel` that is the same for every back end with a prefill and a step function. One
/// sequence.
///
/// Where a step moves rows, a commit is lazy: it is remembered here and carried out at the start of the next
/// step (`ss_convert/graph/interface.py`).
package final class FunctionStepModel<Functions: FunctionCalls> {
    package let limits: StepLimits
    package var wantsLogits = false
    package let functions: Functions
    private let chunk: Int
    private let hasLogits: Bool
    /// Tokens of the committed positions.
    private var committed: [Int] = []
    private var pending = PendingCommit()
    /// Tree and kept nodes of the last step, until its commit.
    private var last: (tree: DraftTree, kept: [Int])?
    /// Outputs of the last step with the streams of every kept node, and those nodes.
    private var lastStreams: (kept: [Int], outputs: Functions.Outputs)?

    private var length: Int { committed.count }

    /// - Parameters:
    ///   - chunk: tokens that one call of the prefill function takes.
    ///   - hasLogits: whether the step function puts out `logits`.
    package init(_ functions: Functions, limits: StepLimits, chunk: Int, hasLogits: Bool) {
        self.functions = functions
        self.limits = limits
        self.chunk = chunk
        self.hasLogits = hasLogits
    }

    /// How many of the first tokens a prefill need not compute again.
    package func reusable(_ tokens: [Int]) -> Int {
        let common = zip(tokens.dropLast(), committed).prefix { $0 == $1 }.count
        // Only a step reads what is still to be moved; a chunk in between would not see it.
        let needsMove = movesLater && common > pending.slot && common < tokens.count - 1
        return needsMove ? pending.slot : common
    }

    private var movesLater: Bool { !pending.nodes.isEmpty }

    /// All but the last token in chunks; the last one as a one-node tree with streams. The cache's memory is
    /// reused: masks hide what an earlier text left in it.
    package func prefill(
        _ tokens: [Int], keeping kept: Int, isolation: isolated (any Actor)?
    ) async throws -> Proposal {
        guard !tokens.isEmpty else { throw SpeculativeError.emptyPrompt }
        guard tokens.count <= limits.context else {
            throw SpeculativeError.promptTooLong(tokens: tokens.count, context: limits.context)
        }
        precondition(kept <= reusable(tokens), "only tokens that were committed can be kept")
        (last, lastStreams) = (nil, nil)
        committed.removeLast(length - kept)
        let behind = tokens.count - 1
        if kept < behind || pending.slot >= kept { pending = PendingCommit(slot: kept) }
        for start in stride(from: kept, to: behind, by: chunk) {
            try checkCancellation()
            let part = tokens[start..<min(start + chunk, behind)]
            do {
                try await functions.prefill(part, length: length, isolation: isolation)
            } catch {
                throw forgetting(error)
            }
            committed += part
            pending = PendingCommit(slot: length)
        }
        let verified = try await step(.rootOnly(tokens[behind]), isolation: isolation)
        try commit([0])
        return Proposal(root: verified.chosen[0], streamLogits: verified.streamLogits, logits: verified.logits)
    }

    package func step(_ tree: DraftTree, isolation: isolated (any Actor)?) async throws -> Verified {
        guard tree.count <= limits.numNodes else {
            throw SpeculativeError.tooManyNodes(requested: tree.count, limit: limits.numNodes)
        }
        if wantsLogits, !hasLogits { throw SpeculativeError.noLogits }
        let outputs: Functions.Outputs
        do {
            outputs = try await functions.step(tree, length: length, pending: pending, isolation: isolation)
        } catch {
            throw forgetting(error)
        }
        // The call consumed the scratch rows of the step before.
        pending = PendingCommit(slot: length)
        let kept = Array(try outputs.integers("kept").prefix { $0 < tree.count })
        last = (tree, kept)
        lastStreams = try outputs.hasStreamsOfEveryNode() ? (kept, outputs) : nil
        let acceptedNode = try outputs.integers("accepted")[0]
        let streams = try streamLogits(ofNode: acceptedNode)
        return Verified(
            kept: kept, chosen: Array(try outputs.integers("chosen").prefix(kept.count)), acceptedNode: acceptedNode,
            streamLogits: try streams ?? outputs.logits("stream_logits", rows: nil, block: 0),
            logits: wantsLogits ? try outputs.logits("logits", rows: kept.count, block: 0) : nil)
    }

    /// Functions that return logits return the streams of all nodes that they kept: [γ, V] of one, until the next
    /// step. Nil from others, whose streams are those of the accepted node.
    package func streamLogits(ofNode node: Int) throws -> LogitRows? {
        guard let (kept, outputs) = lastStreams, let row = kept.firstIndex(of: node) else { return nil }
        return try outputs.logits("stream_logits", rows: nil, block: row)
    }

    package func commit(_ path: [Int]) throws {
        guard let (tree, kept) = last else { throw SpeculativeError.backEnd("commit needs a step before it") }
        guard length + path.count <= limits.context else {
            throw SpeculativeError.contextFull(context: limits.context)
        }
        let rows = path.compactMap(kept.firstIndex(of:))
        guard rows.count == path.count else {
            throw SpeculativeError.backEnd("path \(path) holds nodes that were not kept")
        }
        let accepted = PendingCommit(slot: length, nodes: path, rows: rows)
        if functions.movesRows { pending = accepted } else { try functions.commit(accepted) }
        committed += path.map { tree.tokens[$0] }
        last = nil
    }

    /// After a failed call nobody knows what the cache holds.
    private func forgetting(_ error: any Error) -> any Error {
        (committed, pending) = ([], PendingCommit())
        return error
    }
}
