import Foundation

/// The best children of one parent: ids and log-probabilities, best first, ties to the lower id.
struct RankedChildren {
    var ids: [Int32]
    var logProbabilities: [Float]
}

/// Ranks a row of logits by float32 log-probability over the whole vocabulary, quickly.
///
/// One pass finds the largest logit of every block of `blockSize`, one sums the exponentials; the choice of
/// the best then only looks into blocks whose largest logit can be among them, a few dozen of hundreds.
struct ChildRanker {
    /// Large enough to amortise a block's bookkeeping, small enough that few blocks need a second look.
    static let blockSize = 128

    private var blockMaxima: [Float] = []

    /// The `count` most probable tokens of a row [V].
    mutating func rank(_ logits: UnsafeBufferPointer<Float>, count: Int) -> RankedChildren {
        findBlockMaxima(logits)
        let largest = blockMaxima.max() ?? 0
        let logSum = Float(log(VectorMath.sumOfExponentials(logits, minus: largest)))
        // A token whose block's maximum ranks below the count best blocks' cannot be among the best.
        let blockThreshold = nthLargest(blockMaxima, min(count, blockMaxima.count))
        var floor = count <= blockMaxima.count ? (blockThreshold - largest) - logSum : -Float.infinity
        var best: [(score: Float, id: Int32)] = []
        best.reserveCapacity(4 * count)
        for (block, maximum) in blockMaxima.enumerated() where (maximum - largest) - logSum >= floor {
            let start = block * Self.blockSize
            for id in start..<min(start + Self.blockSize, logits.count) {
                let score = (logits[id] - largest) - logSum
                guard score >= floor else { continue }
                best.append((score, Int32(id)))
            }
            if best.count > 4 * count + Self.blockSize {
                Self.sortAndCut(&best, count)
                // Later ids lose ties, so only a larger score can still enter.
                floor = max(floor, best[count - 1].score.nextUp)
            }
        }
        Self.sortAndCut(&best, count)
        return RankedChildren(ids: best.map(\.id), logProbabilities: best.map(\.score))
    }

    /// Sorts best first (ties to the lower id) and cuts after `count`.
    private static func sortAndCut(_ best: inout [(score: Float, id: Int32)], _ count: Int) {
        best.sort { $0.score != $1.score ? $0.score > $1.score : $0.id < $1.id }
        best.removeLast(max(0, best.count - count))
    }

    private mutating func findBlockMaxima(_ logits: UnsafeBufferPointer<Float>) {
        let blocks = (logits.count + Self.blockSize - 1) / Self.blockSize
        if blockMaxima.count != blocks { blockMaxima = [Float](repeating: 0, count: blocks) }
        for block in 0..<blocks {
            let start = block * Self.blockSize
            let end = min(start + Self.blockSize, logits.count)
            blockMaxima[block] = VectorMath.largest(UnsafeBufferPointer(rebasing: logits[start..<end]))
        }
    }
}

/// The n-th largest (1 = the largest) of a few hundred numbers.
private func nthLargest(_ values: [Float], _ n: Int) -> Float {
    n == 0 ? Float.infinity : values.sorted(by: >)[n - 1]
}
