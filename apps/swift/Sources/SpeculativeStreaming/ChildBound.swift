import Foundation

/// Tells of a parent that none of its children is probable enough, without ranking them over the vocabulary.
///
/// With a bigram bias b_i = u · v_i a child's log-probability is l_i + b_i - log Σ exp(l + b). Jensen's inequality,
/// over any set of tokens and p = softmax(l) on that set, gives
///
///     log Σ exp(l_i + b_i)  ≥  log Σ exp(l_i) + u · Σ p_i v_i
///
/// whose sums do not depend on the parent, and Cauchy's gives l_i + b_i ≤ l_i + |u| |v_i|, which leaves few tokens
/// whose bias must be computed. Both bounds hold for every bias, so the tree stays the one of full ranking.
struct ChildBound {
    /// Far above what float32 rounding adds up to, far below what decides.
    private static let margin: Float = 1e-3
    /// Tokens with less than this share of the mean probability are left out of the set.
    private static let leastShare = 1.0
    private static let blockSize = VectorMath.width

    /// The largest logit and the largest |v| of every block of tokens.
    private let maxima: [Float]
    private let norms: [Float]
    /// log Σ exp(l) and Σ p v [width] over the set.
    private let logSum: Float
    private let meanFactors: [Float]

    /// logits: [V] of the parents' depth.
    init(_ logits: UnsafeBufferPointer<Float>, _ bias: BigramBias) {
        maxima = Self.blockMaxima(logits)
        norms = bias.norms.withUnsafeBufferPointer(Self.blockMaxima)
        let largest = maxima.max() ?? 0
        let all = VectorMath.sumOfExponentials(logits, minus: largest)
        let least = largest + Float(log(Self.leastShare * all / Double(logits.count)))
        let (tokens, weights) = Self.set(of: logits, from: min(least, largest), minus: largest)
        let total = weights.reduce(0, +)
        logSum = largest + Float(log(Double(total)))
        meanFactors = Self.weightedSum(tokens, weights, bias).map { $0 / total }
    }

    /// Whether a child of `parent` may have at least this log-probability; false is certain.
    ///
    /// logits: those of the initialiser.
    func mayReach(
        _ logProbability: Double, _ logits: UnsafeBufferPointer<Float>, _ bias: BigramBias, parent: Int
    ) -> Bool {
        bias.withFactors(parent) { u, v in
            let norm = VectorMath.dot(u, u, width: bias.width).squareRoot()
            let mean = meanFactors.withUnsafeBufferPointer { VectorMath.dot(u, $0.baseAddress!, width: bias.width) }
            let needed = logSum + mean + Float(logProbability) - Self.margin
            return anyBlock(norm: norm, reaching: needed) { block in
                let start = block * Self.blockSize
                return (start..<min(start + Self.blockSize, logits.count)).contains { token in
                    logits[token] + bias.norms[token] * norm >= needed
                        && logits[token] + VectorMath.dot(u, v + token * bias.width, width: bias.width) >= needed
                }
            }
        }
    }

    /// Whether `reaches` holds for a block, asked only where the largest logit and |u| |v| allow it.
    @inline(__always)
    private func anyBlock(norm: Float, reaching needed: Float, _ reaches: (_ block: Int) -> Bool) -> Bool {
        let lanes = VectorMath.width
        return maxima.withUnsafeBufferPointer { maxima in
            norms.withUnsafeBufferPointer { norms in
                var block = 0
                while block + lanes <= maxima.count {
                    let excess = VectorMath.load(maxima.baseAddress! + block)
                        + VectorMath.load(norms.baseAddress! + block) * norm - needed
                    if !VectorMath.areAllNegative(unsafeBitCast(excess, to: VectorMath.Bits.self)) {
                        for lane in 0..<lanes where excess[lane] >= 0 && reaches(block + lane) { return true }
                    }
                    block += lanes
                }
                return (block..<maxima.count).contains { maxima[$0] + norms[$0] * norm >= needed && reaches($0) }
            }
        }
    }

    private static func blockMaxima(_ values: UnsafeBufferPointer<Float>) -> [Float] {
        let (whole, count) = (values.count / blockSize, (values.count + blockSize - 1) / blockSize)
        return [Float](unsafeUninitializedCapacity: count) { target, filled in
            for block in 0..<whole { target[block] = VectorMath.load(values.baseAddress! + block * blockSize).largest }
            if whole < count { target[whole] = values[(whole * blockSize)...].max() ?? 0 }
            filled = count
        }
    }

    /// The tokens whose logit is at least `least`, and exp(l - largest) of each.
    private static func set(
        of logits: UnsafeBufferPointer<Float>, from least: Float, minus largest: Float
    ) -> (tokens: [Int32], weights: [Float]) {
        let tokens = [Int32](unsafeUninitializedCapacity: logits.count + 1) { target, filled in
            for token in logits.indices {  // without a branch, which would often be foretold wrongly
                target[filled] = Int32(truncatingIfNeeded: token)
                filled += logits[token] >= least ? 1 : 0
            }
        }
        var weights = tokens.map { logits[Int($0)] - largest }
        weights.withUnsafeMutableBufferPointer { VectorMath.exponentials($0) }
        return (tokens, weights)
    }

    /// Σ weight · v over tokens, [width].
    private static func weightedSum(_ tokens: [Int32], _ weights: [Float], _ bias: BigramBias) -> [Float] {
        let lanes = VectorMath.width
        var sums = [VectorMath.Lanes](repeating: .init(repeating: 0), count: bias.width / lanes)
        bias.withFactors(0) { _, v in
            sums.withUnsafeMutableBufferPointer { sums in
                for (token, weight) in zip(tokens, weights) {
                    let row = v + Int(token) * bias.width
                    for index in 0..<sums.count {
                        sums[index] = VectorMath.sum(sums[index], weight, VectorMath.load(row + index * lanes))
                    }
                }
            }
        }
        return sums.flatMap { sum in (0..<lanes).map { sum[$0] } }
    }
}
