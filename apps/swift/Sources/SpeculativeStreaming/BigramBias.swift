/// Low-rank bigram term on the actual parent token: `logits_child += u[parent] · vᵀ` (docs/method.md, SS+).
public struct BigramBias: Sendable {
    public let rank: Int
    public let vocabulary: Int
    /// Numbers of a factor as stored: `rank`, and zeros up to a multiple of 8.
    let width: Int
    /// u and v: float32 [V, width].
    private let u: [Float]
    private let v: [Float]
    /// |v| of every token [V].
    let norms: [Float]

    /// u, v: float32 [V, rank], row-major.
    public init(u: [Float], v: [Float], rank: Int) {
        precondition(rank > 0 && u.count == v.count && u.count % rank == 0, "u and v must be [V, rank]")
        self.rank = rank
        vocabulary = u.count / rank
        width = (rank + VectorMath.width - 1) / VectorMath.width * VectorMath.width
        (self.u, self.v) = (Self.padded(u, rank, width), Self.padded(v, rank, width))
        norms = (0..<vocabulary).map { token in
            v[token * rank..<(token + 1) * rank].reduce(0) { $0 + $1 * $1 }.squareRoot()
        }
    }

    private static func padded(_ factors: [Float], _ rank: Int, _ width: Int) -> [Float] {
        guard width > rank else { return factors }
        return stride(from: 0, to: factors.count, by: rank).flatMap { start in
            factors[start..<start + rank] + repeatElement(0, count: width - rank)
        }
    }

    /// Calls `body` with u[parent] [width] and v [V, width].
    func withFactors<Result>(
        _ parent: Int, _ body: (_ u: UnsafePointer<Float>, _ v: UnsafePointer<Float>) -> Result
    ) -> Result {
        u.withUnsafeBufferPointer { u in
            // There is at least one token, so neither is empty.
            v.withUnsafeBufferPointer { body(u.baseAddress! + parent * width, $0.baseAddress!) }
        }
    }

    /// Writes `logits + u[parent] · vᵀ` [V] to `result`.
    func add(
        to logits: UnsafeBufferPointer<Float>, parent: Int, into result: UnsafeMutableBufferPointer<Float>
    ) {
        precondition(logits.count == vocabulary && result.count == vocabulary, "the bias is over the vocabulary")
        guard let logits = logits.baseAddress, let result = result.baseAddress else { return }
        withFactors(parent) { u, v in
            var token = 0
            while token + 4 <= vocabulary {
                let biases = VectorMath.fourDots(u, v + token * width, width: width)
                let sum = UnsafeRawPointer(logits + token).loadUnaligned(as: SIMD4<Float>.self) + biases
                UnsafeMutableRawPointer(result + token).storeBytes(of: sum, as: SIMD4<Float>.self)
                token += 4
            }
            while token < vocabulary {
                result[token] = logits[token] + VectorMath.dot(u, v + token * width, width: width)
                token += 1
            }
        }
    }
}
