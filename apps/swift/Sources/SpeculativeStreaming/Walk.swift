/// The accepted path and what the model said at its end.
public struct AcceptedPath: Sendable, Equatable {
    /// Node ids, root first.
    public let nodes: [Int]
    /// The model's own token at the last node: the next root.
    public let correction: Int

    public init(nodes: [Int], correction: Int) {
        self.nodes = nodes
        self.correction = correction
    }
}

/// The walk (docs/method.md, Walk): from the root follow the kept child equal to the token chosen
/// at the current node; the last node's chosen token is the next root.
///
/// - Parameters:
///   - kept: ascending ids of the nodes that were verified, all of them without pruning.
///   - choose: the model's token at the kept node of that row of `kept`; asked along the path only.
public func walk(
    _ tree: DraftTree, kept: [Int], choose: (_ row: Int) throws -> Int
) rethrows -> AcceptedPath {
    var path = [0]
    var row = 0  // of the current node among `kept`; the root is always the first
    while true {
        let wanted = try choose(row)
        let current = path[path.count - 1]
        // Children come after their parent, in ascending rows.
        guard let next = kept.indices.dropFirst(row + 1).first(where: {
            tree.parents[kept[$0]] == current && tree.tokens[kept[$0]] == wanted
        }) else {
            return AcceptedPath(nodes: path, correction: wanted)
        }
        path.append(kept[next])
        row = next
    }
}
