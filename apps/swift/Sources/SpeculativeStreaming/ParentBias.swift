/// Low-rank bigram term on the actual parent token: `logits_child += u[parent] · vᵀ` (METHOD: Draft trees).
public struct ParentBias: Sendable {
    public let rank: Int
    public let vocabulary: Int
    /// u: float32 [V, rank].
    private let u: [Float]
    /// v by blocks of `blockSize` tokens, [V / blockSize, rank, blockSize], the last block padded: one parent's
    /// bias then reads it once from front to back.
    private let blocks: [Float]
    private static let blockSize = 4 * VectorMath.width

    /// u, v: float32 [V, rank], row-major.
    public init(u: [Float], v: [Float], rank: Int) {
        precondition(rank > 0 && u.count == v.count && u.count % rank == 0, "u and v must be [V, rank]")
        self.rank = rank
        self.vocabulary = u.count / rank
        self.u = u
        let (size, vocabulary) = (Self.blockSize, u.count / rank)
        let count = (vocabulary + size - 1) / size
        blocks = [Float](unsafeUninitializedCapacity: count * rank * size) { target, filled in
            target.initialize(repeating: 0)
            for token in 0..<vocabulary {
                let (block, column) = token.quotientAndRemainder(dividingBy: size)
                for index in 0..<rank { target[(block * rank + index) * size + column] = v[token * rank + index] }
            }
            filled = target.count
        }
    }

    /// Writes `logits + u[parent] · vᵀ` [V] to `result`.
    func add(
        to logits: UnsafeBufferPointer<Float>, parent: Int, into result: UnsafeMutableBufferPointer<Float>
    ) {
        precondition(logits.count == vocabulary && result.count == vocabulary, "the bias is over the vocabulary")
        let size = Self.blockSize
        u.withUnsafeBufferPointer { u in
            blocks.withUnsafeBufferPointer { blocks in
                guard let v = blocks.baseAddress, let factors = u.baseAddress else { return }
                for start in stride(from: 0, to: vocabulary, by: size) {
                    let sums = biases(v + start * rank, factors + parent * rank)
                    let parts = (sums.0, sums.1, sums.2, sums.3)
                    withUnsafeBytes(of: parts) { bytes in
                        let bias = bytes.bindMemory(to: Float.self)
                        for column in 0..<min(size, vocabulary - start) {
                            result[start + column] = logits[start + column] + bias[column]
                        }
                    }
                }
            }
        }
    }

    private typealias Lanes = VectorMath.Lanes

    /// One block's biases: four accumulators that stay in registers over the rank.
    @inline(__always)
    private func biases(
        _ block: UnsafePointer<Float>, _ factors: UnsafePointer<Float>
    ) -> (Lanes, Lanes, Lanes, Lanes) {
        var (a, b) = (Lanes(repeating: 0), Lanes(repeating: 0))
        var (c, d) = (Lanes(repeating: 0), Lanes(repeating: 0))
        var row = block
        for index in 0..<rank {
            let factor = Lanes(repeating: factors[index])
            a += factor * VectorMath.load(row)
            b += factor * VectorMath.load(row + 8)
            c += factor * VectorMath.load(row + 16)
            d += factor * VectorMath.load(row + 24)
            row += Self.blockSize
        }
        return (a, b, c, d)
    }
}
