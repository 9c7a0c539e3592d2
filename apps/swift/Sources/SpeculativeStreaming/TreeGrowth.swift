/// What bounds a draft tree besides its number of nodes.
struct GrowthLimits {
    /// Tokens that get no children.
    var stopIDs: Set<Int> = []
    /// No node lies deeper; nil: as deep as there are streams.
    var maxDepth: Int?
    /// Children of one node at most.
    var maxChildren = 64
}

/// The `numNodes` most probable nodes, path probability = product of edge probabilities.
///
/// Row g-1 of `streamLogits` [γ, V] gives the children at depth g, re-weighted by the true parent token when
/// there is a bigram bias. Best-first search pops nodes in order of path probability, so the result is the
/// optimal tree of that size and closed under ancestors (docs/method.md, Draft trees). Ties go to the node whose
/// place was created first, and among one parent's children to the lower token id.
func bestFirstTree(
    root: Int, streamLogits: LogitRows, numNodes: Int, bigramBias: BigramBias?, limits: GrowthLimits
) -> DraftTree {
    let depthLimit = min(limits.maxDepth ?? streamLogits.rows, streamLogits.rows)
    var children = ChildTable(streamLogits, bigramBias, count: min(limits.maxChildren, numNodes))
    var tokens = [root]
    var parents = [-1]
    var depths = [0]
    var frontier = Frontier()
    var horizon = Horizon(count: numNodes - 1)
    if numNodes > 1, depthLimit > 0, !limits.stopIDs.contains(root) { frontier.open(parent: 0, cost: 0) }
    while tokens.count < numNodes, let place = frontier.pop() {
        let (depth, token) = (depths[place.parent], tokens[place.parent])
        if place.isBound, !children.mayReach(place.cost - horizon.cost, depth: depth, token: token) { continue }
        let ranked = children.ranked(depth: depth, token: token)
        guard !place.isBound else {
            // Its cost was only bounded from below; now that it leads, the exact one is worth computing.
            frontier.settle(place, logProbability: ranked.logProbabilities[0])
            if bigramBias != nil { horizon.add(ranked, parentCost: place.cost) }
            continue
        }
        let node = tokens.count
        tokens.append(Int(ranked.ids[place.rank]))
        parents.append(place.parent)
        depths.append(depths[place.parent] + 1)
        frontier.advance(place, ranked)
        if depths[node] < depthLimit, !limits.stopIDs.contains(tokens[node]) {
            frontier.open(parent: node, cost: place.cost)
        }
    }
    return DraftTree(tokens: tokens, parents: parents)
}

/// The papers' draft: the Cartesian product of each stream's top k, 1 + Σ k^g nodes, level by level, cut
/// after `maxNodes`. streamLogits: [γ, V].
func kAryTree(
    root: Int, streamLogits: LogitRows, k: Int, maxNodes: Int, limits: GrowthLimits
) -> DraftTree {
    let depthLimit = min(limits.maxDepth ?? streamLogits.rows, streamLogits.rows)
    var tokens = [root]
    var parents = [-1]
    var level = [0]
    for depth in 0..<depthLimit {
        let best = streamLogits.withRow(depth) { largestFirst($0, count: k) }
        var grown: [Int] = []
        for parent in level where !limits.stopIDs.contains(tokens[parent]) {
            for token in best {
                guard tokens.count < maxNodes else { return DraftTree(tokens: tokens, parents: parents) }
                grown.append(tokens.count)
                tokens.append(token)
                parents.append(parent)
            }
        }
        level = grown
    }
    return DraftTree(tokens: tokens, parents: parents)
}

/// Ids of the `count` largest logits, best first, ties to the lower id.
private func largestFirst(_ logits: UnsafeBufferPointer<Float>, count: Int) -> [Int] {
    var best: [Int] = []
    for id in logits.indices {
        guard best.count < count || logits[id] > logits[best[best.count - 1]] else { continue }
        if best.count == count { best.removeLast() }
        let place = best.firstIndex { logits[id] > logits[$0] } ?? best.count
        best.insert(id, at: place)
    }
    return best
}

/// Ranked children, computed once per (depth of the parent, parent token). Without a bigram bias the token
/// does not matter.
private struct ChildTable {
    private let streamLogits: LogitRows
    private let bigramBias: BigramBias?
    private let count: Int
    private var ranker = ChildRanker()
    private var known: [[Int: RankedChildren]]
    private var bounds: [ChildBound?]

    init(_ streamLogits: LogitRows, _ bigramBias: BigramBias?, count: Int) {
        self.streamLogits = streamLogits
        self.bigramBias = bigramBias
        self.count = count
        known = Array(repeating: [:], count: streamLogits.rows)
        bounds = Array(repeating: nil, count: streamLogits.rows)
    }

    /// Whether a child may have at least this log-probability. Costs next to nothing beside ranking over the
    /// vocabulary for a bigram bias, without which every parent of a depth has the same children.
    mutating func mayReach(_ logProbability: Double, depth: Int, token: Int) -> Bool {
        guard let bigramBias, logProbability > -.infinity, known[depth][token] == nil else { return true }
        return streamLogits.withRow(depth) { row in
            let bound = bounds[depth] ?? ChildBound(row, bigramBias)
            bounds[depth] = bound
            return bound.mayReach(logProbability, row, bigramBias, parent: token)
        }
    }

    mutating func ranked(depth: Int, token: Int) -> RankedChildren {
        let key = bigramBias == nil ? -1 : token
        if let found = known[depth][key] { return found }
        let count = count
        let fresh = streamLogits.withRow(depth) { row -> RankedChildren in
            guard let bigramBias else { return ranker.rank(row, count: count) }
            return withUnsafeTemporaryAllocation(of: Float.self, capacity: row.count) { biased in
                bigramBias.add(to: row, parent: token, into: biased)
                return ranker.rank(UnsafeBufferPointer(biased), count: count)
            }
        }
        known[depth][key] = fresh
        return fresh
    }
}

/// A place in the tree that may be filled next: the `rank`-th best child of `parent`.
private struct Place {
    /// -log of the path probability, or a lower bound of it.
    var cost: Double
    let created: Int
    let parent: Int
    let rank: Int
    /// A parent's first child costs at least what the parent costs; its children are only ranked (with a
    /// bigram bias over the whole vocabulary) when that bound leads the queue.
    var isBound: Bool

    /// Earlier in the queue. A bound precedes an equal exact cost, because what it hides may be equal.
    func precedes(_ other: Place) -> Bool {
        if cost != other.cost { return cost < other.cost }
        if isBound != other.isBound { return isBound }
        return created < other.created
    }
}

/// The cost beyond which no node can enter the tree: that of the last one if no better ones were found any more.
private struct Horizon {
    private let count: Int
    /// The lowest costs of nodes found so far, ascending.
    private var costs: [Double] = []

    /// count: nodes of the tree below its root.
    init(count: Int) { self.count = count }

    var cost: Double { costs.count < count ? .infinity : (costs.last ?? .infinity) }

    /// Adds a parent's children.
    mutating func add(_ ranked: RankedChildren, parentCost: Double) {
        var merged: [Double] = []
        merged.reserveCapacity(count)
        var known = costs[...]
        var new = ranked.logProbabilities[...]
        while merged.count < count {
            let cost = new.first.map { parentCost - Double($0) } ?? .infinity
            if let next = known.first, next <= cost {
                merged.append(next)
                known.removeFirst()
            } else if new.popFirst() != nil {
                merged.append(cost)
            } else {
                break
            }
        }
        costs = merged
    }
}

/// The priority queue of best-first search: a binary heap of places.
private struct Frontier {
    private var heap: [Place] = []
    private var created = 0

    /// Adds the first child of `parent`, whose own path costs `cost`.
    mutating func open(parent: Int, cost: Double) {
        push(Place(cost: cost, created: created, parent: parent, rank: 0, isBound: true))
        created += 1
    }

    /// Puts a bounded place back with its exact cost and its order of creation.
    mutating func settle(_ place: Place, logProbability: Float) {
        var exact = place
        exact.cost -= Double(logProbability)
        exact.isBound = false
        push(exact)
    }

    /// Adds the next sibling of a place that was filled.
    mutating func advance(_ place: Place, _ ranked: RankedChildren) {
        let rank = place.rank + 1
        guard rank < ranked.logProbabilities.count else { return }
        let base = place.cost + Double(ranked.logProbabilities[place.rank])
        let cost = base - Double(ranked.logProbabilities[rank])
        push(Place(cost: cost, created: created, parent: place.parent, rank: rank, isBound: false))
        created += 1
    }

    mutating func pop() -> Place? {
        guard let first = heap.first else { return nil }
        let last = heap.removeLast()
        guard !heap.isEmpty else { return first }
        heap[0] = last
        var index = 0
        while true {
            var smallest = index
            for child in [2 * index + 1, 2 * index + 2]
            where child < heap.count && heap[child].precedes(heap[smallest]) {
                smallest = child
            }
            guard smallest != index else { return first }
            heap.swapAt(index, smallest)
            index = smallest
        }
    }

    private mutating func push(_ place: Place) {
        heap.append(place)
        var index = heap.count - 1
        while index > 0, heap[index].precedes(heap[(index - 1) / 2]) {
            heap.swapAt(index, (index - 1) / 2)
            index = (index - 1) / 2
        }
    }
}
