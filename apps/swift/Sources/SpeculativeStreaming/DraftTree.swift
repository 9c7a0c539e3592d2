/// A draft of `count` tokens drawn as a tree: node 0 is the root, the already decided token, and parents
/// come before their children.
///
///     tokens   [ SELECT, name, count, FROM, ( ]        SELECT ─┬─ name ─── FROM
///     parents  [     -1,    0,     0,    1, 2 ]                └─ count ── (
///     depths   [      0,    1,     1,    2, 2 ]
public struct DraftTree: Sendable, Equatable {
    public let tokens: [Int]
    public let parents: [Int]
    public let depths: [Int]

    /// A tree from tokens and parents; depths are derived.
    ///
    /// - Precondition: one root with parent -1, every other parent before its child.
    public init(tokens: [Int], parents: [Int]) {
        precondition(tokens.count == parents.count && parents.first == -1, "a tree needs a root with parent -1")
        var depths = [Int](repeating: 0, count: parents.count)
        for node in parents.indices.dropFirst() {
            let parent = parents[node]
            precondition(parent >= 0 && parent < node, "parents come before their children")
            depths[node] = depths[parent] + 1
        }
        self.tokens = tokens
        self.parents = parents
        self.depths = depths
    }

    /// The tree of plain decoding: one node.
    public static func rootOnly(_ token: Int) -> DraftTree {
        DraftTree(tokens: [token], parents: [-1])
    }

    public var count: Int { tokens.count }

    /// Node ids from the root to `node`, both included.
    public func path(to node: Int) -> [Int] {
        var nodes: [Int] = []
        var current = node
        while current >= 0 {
            nodes.append(current)
            current = parents[current]
        }
        return nodes.reversed()
    }

    /// Row-major booleans [size, size]: row v sees column u when u is v or an ancestor of v.
    ///
    /// `size` ≥ `count` pads with nodes that see only themselves (docs/method.md, Draft trees).
    public func ancestorMask(size: Int? = nil) -> [Bool] {
        let size = size ?? count
        precondition(size >= count, "the mask cannot be smaller than the tree")
        var mask = [Bool](repeating: false, count: size * size)
        for node in 0..<size {
            mask[node * size + node] = true
            guard node < count, parents[node] >= 0 else { continue }
            // A node sees what its parent sees: that row is complete, since parents come first.
            for column in 0..<node where mask[parents[node] * size + column] {
                mask[node * size + column] = true
            }
        }
        return mask
    }
}
