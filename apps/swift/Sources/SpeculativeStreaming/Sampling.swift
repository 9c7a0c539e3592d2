import Foundation

/// How the next token is chosen from what the model says.
public enum Sampler: Sendable, Equatable {
    /// The largest main logit, as the graph computes it.
    case greedy
    /// Drawn on the host with noise keyed by seed and position; needs a back end that returns logits.
    case sampling(Sampling)
}

/// How a token is drawn from logits: the target distribution of one node, and noise keyed by seed and
/// position (docs/method.md, Choosing tokens).
///
/// With keyed noise the draw at a position depends on (seed, position, logits) alone, so speculation does
/// not change the text.
public struct Sampling: Sendable, Equatable {
    public let temperature: Double
    public let topK: Int
    public let topP: Double
    public let minP: Double
    public let seed: UInt64

    /// Filters work in the order of the arguments, each on the probabilities renormalised after the one
    /// before. Throws `invalidSetting` for a value out of range.
    ///
    /// - Parameters:
    ///   - temperature: > 0, divides the logits.
    ///   - topK: keeps the k most probable tokens; 0 keeps all.
    ///   - topP: keeps the smallest set of most probable tokens that reaches p; 1 keeps all.
    ///   - minP: keeps p ≥ minP · largest p; 0 keeps all.
    ///   - seed: of the keyed noise.
    public init(
        temperature: Double = 1, topK: Int = 0, topP: Double = 1, minP: Double = 0, seed: UInt64 = 0
    ) throws {
        guard temperature > 0 else {
            throw SpeculativeError.invalidSetting(
                "temperature \(temperature) must be above 0 (greedy: no sampling)")
        }
        guard topK >= 0 else { throw SpeculativeError.invalidSetting("top-k \(topK) must not be negative") }
        guard topP > 0, topP <= 1 else {
            throw SpeculativeError.invalidSetting("top-p \(topP) must lie in (0, 1]")
        }
        guard minP >= 0, minP <= 1 else {
            throw SpeculativeError.invalidSetting("min-p \(minP) must lie in [0, 1]")
        }
        self.temperature = temperature
        self.topK = topK
        self.topP = topP
        self.minP = minP
        self.seed = seed
    }

    /// The token at `position` (0 is the prompt's first token), drawn with the keyed noise.
    public func choose(_ logits: UnsafeBufferPointer<Float>, position: Int) -> Int {
        draw(from: probabilities(logits), uniform: keyedUniform(seed: seed, position: UInt64(position)))
    }

    /// Target distribution [V] of logits [V]. Ties at a filter's edge go to the lower id.
    public func probabilities(_ logits: UnsafeBufferPointer<Float>) -> [Double] {
        let scaled = logits.map { Double($0) / temperature }
        let largest = scaled.max() ?? 0
        var probs = scaled.map { exp($0 - largest) }
        normalise(&probs)
        if topK > 0, topK < probs.count {
            for id in mostProbableFirst(probs).dropFirst(topK) { probs[id] = 0 }
            normalise(&probs)
        }
        if topP < 1 {
            var reached = 0.0
            for id in mostProbableFirst(probs) {
                let own = probs[id]
                reached += own
                if reached - own >= topP { probs[id] = 0 }
            }
            normalise(&probs)
        }
        if minP > 0 {
            let floor = minP * (probs.max() ?? 0)
            for id in probs.indices where probs[id] < floor { probs[id] = 0 }
            normalise(&probs)
        }
        return probs
    }

    private func mostProbableFirst(_ probs: [Double]) -> [Int] {
        probs.indices.sorted { probs[$0] != probs[$1] ? probs[$0] > probs[$1] : $0 < $1 }
    }

    private func normalise(_ probs: inout [Double]) {
        let total = probs.withUnsafeBufferPointer(pairwiseSum)
        for id in probs.indices { probs[id] /= total }
    }
}

/// A uniform number in [0, 1) that depends on seed and position alone: the upper 53 bits of
/// splitmix64(seed xor splitmix64(position)), Vigna's splitmix64 finaliser.
public func keyedUniform(seed: UInt64, position: UInt64) -> Double {
    Double(splitmix64(seed ^ splitmix64(position)) >> 11) * 0x1p-53
}

/// Inverse transform in token id order: the first id whose cumulative sum exceeds uniform · total.
public func draw(from probabilities: [Double], uniform: Double) -> Int {
    var cumulative = probabilities
    for id in cumulative.indices.dropFirst() { cumulative[id] += cumulative[id - 1] }
    let target = uniform * (cumulative.last ?? 0)
    // Rounding can put the product on the total itself; the last possible token is meant then.
    let lastPossible = probabilities.lastIndex { $0 != 0 } ?? 0
    return min(cumulative.firstIndex { $0 > target } ?? lastPossible, lastPossible)
}

/// Sum in the order of numpy's pairwise summation: equal probabilities can put a filter's edge exactly on a
/// token, and both sides must then round alike.
private func pairwiseSum(_ values: UnsafeBufferPointer<Double>) -> Double {
    if values.count < 8 { return values.reduce(0, +) }
    if values.count > 128 {
        let half = values.count / 2 / 8 * 8
        return pairwiseSum(UnsafeBufferPointer(rebasing: values[..<half]))
            + pairwiseSum(UnsafeBufferPointer(rebasing: values[half...]))
    }
    var sums = Array(values[..<8])
    let whole = values.count / 8 * 8
    for index in 8..<max(8, whole) { sums[index % 8] += values[index] }
    let total = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))
    return values[whole...].reduce(total, +)
}

func splitmix64(_ value: UInt64) -> UInt64 {
    var mixed = value &+ 0x9E37_79B9_7F4A_7C15
    mixed = (mixed ^ (mixed >> 30)) &* 0xBF58_476D_1CE4_E5B9
    mixed = (mixed ^ (mixed >> 27)) &* 0x94D0_49BB_1331_11EB
    return mixed ^ (mixed >> 31)
}
