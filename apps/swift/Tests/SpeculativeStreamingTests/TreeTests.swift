import Foundation
import Testing

@testable import SpeculativeStreaming

/// Trees, masks and walks as the Python side recorded them.
@Suite struct TreeTests {
    let recorded = try! Recorded("trees")

    private func grown(_ row: Int) throws -> DraftTree {
        let (vocabulary, stop) = (recorded.int("vocab", row), recorded.int("stop_modulus", row))
        let key = UInt64(recorded.int("key", row))
        let logits = hashLogits(
            key: key, rows: recorded.int("streams", row), vocabulary: vocabulary, ties: recorded.int("kind", row) == 1)
        let drafter = try Drafter(
            numNodes: recorded.int("nodes", row), shape: recordedShapes[recorded.int("shape", row)],
            treeTopK: recorded.int("tree_top_k", row),
            bigramBias: hashBias(key: key, vocabulary: vocabulary, rank: recorded.int("rank", row)))
        let stops = stop == 0 ? [] : Set(stride(from: 0, to: vocabulary, by: stop))
        return drafter.grow(
            root: recorded.int("root", row), streamLogits: logits, stopIDs: stops,
            maxDepth: recorded.int("max_depth", row))
    }

    @Test func everyTreeIsTheRecordedOne() throws {
        #expect(recorded.rows("key") >= 400)
        for row in 0..<recorded.rows("key") {
            let tree = try grown(row)
            #expect(tree.tokens == recorded.ints("tokens", row), "case \(row)")
            #expect(tree.parents == recorded.ints("parents", row), "case \(row)")
            #expect(tree.depths == recorded.ints("depths", row), "case \(row)")
        }
    }

    @Test func everyMaskIsTheRecordedOne() throws {
        for row in 0..<recorded.rows("key") {
            let tree = DraftTree(tokens: recorded.ints("tokens", row), parents: recorded.ints("parents", row))
            let bits = recorded.ints("mask", row).flatMap { byte in (0..<8).map { byte >> (7 - $0) & 1 == 1 } }
            let mask = tree.ancestorMask(size: tree.count + 3)
            #expect(mask == Array(bits.prefix(mask.count)), "case \(row)")
        }
    }

    @Test func everyWalkIsTheRecordedOne() throws {
        for row in 0..<recorded.rows("key") {
            let tree = DraftTree(tokens: recorded.ints("tokens", row), parents: recorded.ints("parents", row))
            let (kept, chosen) = (recorded.ints("kept", row), recorded.ints("chosen", row))
            let accepted = walk(tree, kept: kept) { chosen[$0] }
            #expect(accepted.nodes == recorded.ints("path", row), "case \(row)")
            let last = try #require(kept.firstIndex(of: accepted.nodes[accepted.nodes.count - 1]))
            #expect(accepted.correction == chosen[last])
        }
    }

    /// The bound that postpones ranking must not change the order: equal rows give exact ties between paths.
    @Test func tiesBetweenPathsGoToTheEarlierPlace() throws {
        let logits = LogitRows(rows: 2, vocabulary: 2, values: [0, 0, 0, 0])
        let tree = try Drafter(numNodes: 7).grow(root: 1, streamLogits: logits)
        #expect(tree.tokens == [1, 0, 1, 0, 0, 1, 1])
        #expect(tree.parents == [-1, 0, 0, 1, 2, 1, 2])
    }

    /// Trees of flat, peaked and strongly biased distributions, against a search that ranks every parent over the
    /// whole vocabulary in double precision.
    @Test func leavingOutHopelessParentsChangesNoTree() throws {
        var leftOut = 0
        for key in UInt64(1)...24 {
            let (vocabulary, rank) = (509, 5)
            let spread = Float([0.3, 1, 2][Int(key % 3)])
            let logits = LogitRows(
                rows: 3, vocabulary: vocabulary,
                values: hashLogits(key: key, rows: 3, vocabulary: vocabulary).values.map { $0 * spread })
            let bias = try #require(hashBias(key: key, vocabulary: vocabulary, rank: rank))
            let tree = try Drafter(numNodes: 16, bigramBias: bias).grow(root: 7, streamLogits: logits)
            let naive = NaiveSearch(key: key, vocabulary: vocabulary, rank: rank, logits: logits)
            let expected = naive.tree(root: 7, numNodes: 16)
            #expect(tree.tokens == expected.tokens, "key \(key)")
            #expect(tree.parents == expected.parents, "key \(key)")
            leftOut += naive.countHopeless(expected, bias)
        }
        #expect(leftOut > 50, "the bound must spare most parents without children")
    }

    @Test func logProbabilitiesAreNormalised() {
        let logits = hashLogits(key: 5, rows: 1, vocabulary: 1003)
        var ranker = ChildRanker()
        let ranked = logits.withRow(0) { ranker.rank($0, count: 1003) }
        #expect(ranked.ids.count == 1003)
        let total = ranked.logProbabilities.reduce(0.0) { $0 + exp2(Double($1) / 0.6931471805599453) }
        #expect(abs(total - 1) < 1e-5)
        #expect(zip(ranked.logProbabilities, ranked.logProbabilities.dropFirst()).allSatisfy { $0 >= $1 })
    }

    @Test func constantLogitsRankTheLowestIds() {
        let logits = LogitRows(rows: 1, vocabulary: 9000, values: Array(repeating: 2, count: 9000))
        var ranker = ChildRanker()
        #expect(logits.withRow(0) { ranker.rank($0, count: 20).ids } == Array(0..<20))
    }

    @Test func exponentialIsExactEnough() {
        for index in 0..<998 {
            let x = -Float(index) * 0.0871
            let (found, expected) = (VectorMath.exponential(.init(repeating: x))[3], Float(exp2(Double(x) * 1.4426950408889634)))
            #expect(abs(found - expected) <= 3e-7 * expected)
        }
        #expect(VectorMath.exponential(.init(repeating: -200)) == .init(repeating: 0))
    }
}

