/// Rows of logits over the vocabulary: float32 [rows, vocabulary], row-major.
public struct LogitRows: Sendable, Equatable {
    public let rows: Int
    public let vocabulary: Int
    public let values: [Float]

    /// `values.count` must be `rows * vocabulary`.
    public init(rows: Int, vocabulary: Int, values: [Float]) {
        precondition(values.count == rows * vocabulary, "values must hold rows * vocabulary numbers")
        self.rows = rows
        self.vocabulary = vocabulary
        self.values = values
    }

    /// Calls `body` with row `row`, [vocabulary], without copying it.
    public func withRow<Result>(
        _ row: Int, _ body: (UnsafeBufferPointer<Float>) throws -> Result
    ) rethrows -> Result {
        try values.withUnsafeBufferPointer { all in
            try body(UnsafeBufferPointer(rebasing: all[row * vocabulary..<(row + 1) * vocabulary]))
        }
    }

    /// Id of the largest logit of a row; ties go to the lower id.
    public func argmax(_ row: Int) -> Int {
        withRow(row) { logits in
            var best = 0
            for id in 1..<max(1, logits.count) where logits[id] > logits[best] { best = id }
            return best
        }
    }
}
