import Testing

@testable import SpeculativeStreaming

/// The sampler of a recorded generation; temperature 0 stands for greedy.
func recordedSampler(_ recorded: Recorded, _ row: Int) throws -> Sampler {
    let settings = recorded.doubles("settings", row)
    guard settings[0] > 0 else { return .greedy }
    return .sampling(
        try Sampling(
            temperature: settings[0], topK: recorded.int("top_k", row), topP: settings[1], minP: settings[2],
            seed: UInt64(recorded.int("seed", row))))
}

/// Whole generations as the Python side recorded them: every tree, path and token.
@Suite struct DecodingTests {
    private func loop(_ recorded: Recorded, _ row: Int, nodes: Int? = nil) throws -> DecodingLoop {
        let (key, vocabulary) = (UInt64(recorded.int("key", row)), recorded.int("vocab", row))
        let model = HashModel(
            key: key, vocabulary: vocabulary,
            limits: StepLimits(
                numNodes: 32, numKept: 32, numStreams: recorded.int("streams", row), context: recorded.int("context", row)))
        let drafter = try Drafter(
            numNodes: nodes ?? recorded.int("nodes", row), shape: recordedShapes[recorded.int("shape", row)],
            bigramBias: hashBias(key: key, vocabulary: vocabulary, rank: recorded.int("rank", row)))
        let request = DecodingRequest(
            prompt: recorded.ints("prompt", row), maxTokens: recorded.int("max_tokens", row),
            stopIDs: Set(recorded.ints("stop_ids", row)), sampler: try recordedSampler(recorded, row))
        return try DecodingLoop(model: model, drafter: drafter, request: request)
    }

    @Test func everyStepOfEveryGenerationIsTheRecordedOne() async throws {
        let recorded = try Recorded("decoding")
        var call = 0
        for row in 0..<recorded.rows("key") {
            var loop = try loop(recorded, row)
            var generated = try #require(try await loop.next()).tokens
            for _ in 0..<recorded.int("calls", row) {
                let step = try #require(try await loop.next())
                #expect(step.tree?.tokens == recorded.ints("call_tokens", call), "generation \(row)")
                #expect(step.tree?.parents == recorded.ints("call_parents", call), "generation \(row)")
                #expect(step.path == recorded.ints("call_path", call), "generation \(row)")
                #expect(step.tokens == recorded.ints("call_emitted", call), "generation \(row)")
                generated += step.tokens
                call += 1
            }
            #expect(generated == recorded.ints("generated", row))
            #expect(try await loop.next() == nil)
            #expect(loop.finishReason != nil)
        }
        #expect(call >= 200)
    }

    /// Invariant 1 and 5: drafts change neither greedy text nor text sampled with keyed noise.
    @Test func plainDecodingGivesTheSameText() async throws {
        let recorded = try Recorded("decoding")
        for row in 0..<recorded.rows("key") {
            var loop = try loop(recorded, row, nodes: 1)
            var generated: [Int] = []
            while let step = try await loop.next() { generated += step.tokens }
            #expect(generated == recorded.ints("generated", row), "generation \(row)")
        }
    }

    @Test func requestsThatDoNotFitAreRefused() throws {
        let model = HashModel(
            key: 1, vocabulary: 9, limits: StepLimits(numNodes: 4, numKept: 4, numStreams: 2, context: 3))
        func start(_ prompt: [Int], nodes: Int = 4, maxTokens: Int = 5) throws {
            _ = try DecodingLoop(
                model: model, drafter: Drafter(numNodes: nodes),
                request: DecodingRequest(prompt: prompt, maxTokens: maxTokens))
        }
        #expect(throws: SpeculativeError.promptTooLong(tokens: 4, context: 3)) { try start([1, 2, 3, 4]) }
        #expect(throws: SpeculativeError.emptyPrompt) { try start([]) }
        #expect(throws: SpeculativeError.tooManyNodes(requested: 5, limit: 4)) { try start([1], nodes: 5) }
        #expect(throws: SpeculativeError.invalidSetting("max tokens must be at least 1, not 0")) {
            try start([1], maxTokens: 0)
        }
    }
}

/// Generations of a small random Llama on the PyTorch reference.
@Suite struct ReferenceTests {
    /// Says what the reference said, whatever is asked.
    private final class Playback: StepModel {
        let limits = StepLimits(numNodes: 12, numKept: 12, numStreams: 3, context: 256)
        var wantsLogits = false
        let recorded: Recorded
        let row: Int
        var call: Int
        private let vocabulary = 280

        init(_ recorded: Recorded, row: Int, call: Int) {
            (self.recorded, self.row, self.call) = (recorded, row, call)
        }

        func prefill(
            _ tokens: [Int], keeping kept: Int, isolation: isolated (any Actor)?
        ) async throws -> Proposal {
            let logits = LogitRows(rows: 1, vocabulary: vocabulary, values: recorded.floats("first_logits", row))
            return Proposal(
                root: logits.argmax(0), streamLogits: streams(recorded.floats("first_streams", row)), logits: logits)
        }

        func step(_ tree: DraftTree, isolation: isolated (any Actor)?) async throws -> Verified {
            #expect(tree.tokens == recorded.ints("tokens", call))
            #expect(tree.parents == recorded.ints("parents", call))
            // Logits were recorded along the path only; the walk must not look at others.
            var values = [Float](repeating: .nan, count: tree.count * vocabulary)
            if wantsLogits {
                let known = recorded.floats("path_logits", call)
                for (index, node) in recorded.ints("path", call).enumerated() {
                    let place = node * vocabulary..<(node + 1) * vocabulary
                    values.replaceSubrange(place, with: known[index * vocabulary..<(index + 1) * vocabulary])
                }
            }
            return Verified(
                kept: Array(0..<tree.count), chosen: recorded.ints("chosen", call),
                acceptedNode: recorded.int("accepted_node", call), streamLogits: streams(recorded.floats("stream_logits", call)),
                logits: LogitRows(rows: tree.count, vocabulary: vocabulary, values: values))
        }

        func commit(_ path: [Int]) throws {
            #expect(path == recorded.ints("path", call))
            call += 1
        }

        private func streams(_ values: [Float]) -> LogitRows {
            LogitRows(rows: values.count / vocabulary, vocabulary: vocabulary, values: values)
        }
    }

    @Test func everyGenerationIsTheRecordedOne() async throws {
        let recorded = try Recorded("reference")
        var call = 0
        for row in 0..<recorded.rows("prompt") {
            let model = Playback(recorded, row: row, call: call)
            let request = DecodingRequest(
                prompt: recorded.ints("prompt", row), maxTokens: 24, sampler: try recordedSampler(recorded, row))
            var loop = try DecodingLoop(model: model, drafter: Drafter(numNodes: 12), request: request)
            var generated: [Int] = []
            while let step = try await loop.next() { generated += step.tokens }
            call += recorded.int("calls", row)
            #expect(generated == recorded.ints("generated", row))
            #expect(model.call == call)
        }
        #expect(call >= 100)
    }
}
