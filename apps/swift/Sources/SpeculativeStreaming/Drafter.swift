/// How a tree is grown from stream logits. One node is plain decoding.
public struct Drafter: Sendable {
    public enum Shape: String, Sendable, CaseIterable {
        /// The most probable nodes under the product of edge probabilities.
        case bestFirst = "best-first"
        /// 1 + depth nodes, each the best child of the one before.
        case chain
        /// The papers' Cartesian product of each stream's top k.
        case kAry = "k-ary"
    }

    public let numNodes: Int
    public let shape: Shape
    /// Children per node of a k-ary tree.
    public let treeTopK: Int
    public let bigramBias: BigramBias?

    /// Throws `invalidSetting` for less than one node or one child.
    public init(
        numNodes: Int, shape: Shape = .bestFirst, treeTopK: Int = 3, bigramBias: BigramBias? = nil
    ) throws {
        guard numNodes >= 1 else {
            throw SpeculativeError.invalidSetting("a tree needs at least 1 node, not \(numNodes)")
        }
        guard treeTopK >= 1 else {
            throw SpeculativeError.invalidSetting("tree-top-k \(treeTopK) of a k-ary tree must be at least 1")
        }
        self.numNodes = numNodes
        self.shape = shape
        self.treeTopK = treeTopK
        self.bigramBias = bigramBias
    }

    /// The same drafter with fewer nodes; nil changes nothing. Throws `tooManyNodes` for more of them.
    public func limited(to numNodes: Int?) throws -> Drafter {
        guard let numNodes else { return self }
        guard numNodes <= self.numNodes else {
            throw SpeculativeError.tooManyNodes(requested: numNodes, limit: self.numNodes)
        }
        return try Drafter(numNodes: numNodes, shape: shape, treeTopK: treeTopK, bigramBias: bigramBias)
    }

    /// The draft tree below a root, at most `maxDepth` deep, nothing below stop ids.
    ///
    /// streamLogits: [γ, V]; nil gives the root alone.
    public func grow(
        root: Int, streamLogits: LogitRows?, stopIDs: Set<Int> = [], maxDepth: Int = .max
    ) -> DraftTree {
        guard numNodes > 1, maxDepth > 0, let streamLogits else { return .rootOnly(root) }
        var limits = GrowthLimits(stopIDs: stopIDs, maxDepth: maxDepth)
        if shape == .kAry {
            return kAryTree(root: root, streamLogits: streamLogits, k: treeTopK, maxNodes: numNodes, limits: limits)
        }
        if shape == .chain { limits.maxChildren = 1 }
        return bestFirstTree(
            root: root, streamLogits: streamLogits, numNodes: numNodes, bigramBias: bigramBias, limits: limits)
    }
}
