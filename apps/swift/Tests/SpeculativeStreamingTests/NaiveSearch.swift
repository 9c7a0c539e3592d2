import Foundation

@testable import SpeculativeStreaming

/// Best-first search as it is defined: every open parent's children in double precision, the cheapest node next.
struct NaiveSearch {
    private let vocabulary: Int
    private let rank: Int
    private let logits: LogitRows
    private let factors: (u: [Float], v: [Float])

    init(key: UInt64, vocabulary: Int, rank: Int, logits: LogitRows) {
        (self.vocabulary, self.rank, self.logits) = (vocabulary, rank, logits)
        factors = hashFactors(key: key, vocabulary: vocabulary, rank: rank)
    }

    /// Log-probabilities [V] of the children of a parent with this token, by stream `depth`.
    func logProbabilities(depth: Int, token: Int) -> [Double] {
        let biased = (0..<vocabulary).map { id in
            (0..<rank).reduce(Double(logits.values[depth * vocabulary + id])) { sum, index in
                sum + Double(factors.u[token * rank + index]) * Double(factors.v[id * rank + index])
            }
        }
        let largest = biased.max() ?? 0
        let logSum = largest + log(biased.reduce(0) { $0 + exp($1 - largest) })
        return biased.map { $0 - logSum }
    }

    func tree(root: Int, numNodes: Int) -> DraftTree {
        var (tokens, parents, depths, scores) = ([root], [-1], [0], [0.0])
        var open: [(score: Double, parent: Int, token: Int)] = []
        func grow(_ node: Int) {
            guard depths[node] < logits.rows else { return }
            for (id, own) in logProbabilities(depth: depths[node], token: tokens[node]).enumerated() {
                open.append((scores[node] + own, node, id))
            }
        }
        grow(0)
        while tokens.count < numNodes, let best = open.indices.max(by: { open[$0].score < open[$1].score }) {
            let found = open.remove(at: best)
            tokens.append(found.token)
            parents.append(found.parent)
            depths.append(depths[found.parent] + 1)
            scores.append(found.score)
            grow(tokens.count - 1)
        }
        return DraftTree(tokens: tokens, parents: parents)
    }

    /// Nodes of a tree without children that the bound tells apart, given the cost of the tree's last node. It may
    /// never call one with a child in the tree hopeless; -1000 shows that it did.
    func countHopeless(_ tree: DraftTree, _ bias: BigramBias) -> Int {
        var scores = [0.0]
        for node in 1..<tree.count {
            let parent = tree.parents[node]
            let own = logProbabilities(depth: tree.depths[parent], token: tree.tokens[parent])[tree.tokens[node]]
            scores.append(scores[parent] + own)
        }
        let last = scores[tree.count - 1]
        return (1..<tree.count).filter { tree.depths[$0] < logits.rows }.reduce(0) { count, node in
            let mayReach = logits.withRow(tree.depths[node]) { row in
                ChildBound(row, bias).mayReach(last - scores[node], row, bias, parent: tree.tokens[node])
            }
            return mayReach ? count : tree.parents.contains(node) ? -1000 : count + 1
        }
    }
}
