#if canImport(FoundationModels) && canImport(CoreAI) && (compiler(>=6.4) || os(Linux))
    import Foundation
    import FoundationModels
    import SpeculativeStreaming
    import SpeculativeStreamingCoreAI
    import Testing
    import TinyBundles

    @testable import SpeculativeStreamingFoundationModels

    /// The tiny base's tokens are bytes; characters beyond ASCII, which its answers are full of, become any one.
    private struct Bytes: TextTokenizer {
        let decoder: ByteLevelDecoder
        /// Whether conversations get markers, as chat templates write them.
        let marks: Bool
        private let ids: [String: Int]

        init(_ decoder: ByteLevelDecoder, marks: Bool) {
            (self.decoder, self.marks) = (decoder, marks)
            let texts = (3..<259).map { (decoder.decode([$0]), $0) }
            ids = Dictionary(texts, uniquingKeysWith: { first, _ in first })
        }

        func encode(_ text: String) throws -> [Int] { text.map { ids[String($0)] ?? 3 } }

        func decode(_ tokens: [Int]) -> String { decoder.decode(tokens) }

        func encode(chat messages: [ChatMessage]) throws -> [Int] {
            guard marks else { return try encode(messages.map(\.content).joined(separator: "\n")) }
            let marked = messages.map { ($0.role == .assistant ? "|" : ">") + $0.content }
            return try encode(marked.joined() + "|")
        }
    }

    /// Counts of answers, in order.
    private final class Reports: @unchecked Sendable {
        private let lock = NSLock()
        private var all: [GenerationStatistics] = []

        func add(_ counts: GenerationStatistics) { lock.withLock { all.append(counts) } }

        var last: GenerationStatistics? { lock.withLock { all.last } }
    }

    @Suite(.serialized, .enabled(if: TinyBundle.hasAssets, "coreai-core is not installed: the bundles have no assets"))
    struct SessionTests {
        private let reports = Reports()

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, visionOS 27.0, *)
        private func model(_ name: String = "coreai", marks: Bool = false) throws -> SpeculativeLanguageModel {
            let (tiny, reports) = (try TinyBundle(name), reports)
            return try SpeculativeLanguageModel(
                tiny.bundle, adapter: "tiny", tokenizer: Bytes(tiny.tokenizer, marks: marks),
                backEnd: .coreAI(), report: { reports.add($0) })
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, visionOS 27.0, *)
        private func tokens(_ count: Int) -> FoundationModels.GenerationOptions {
            FoundationModels.GenerationOptions(maximumResponseTokens: count)
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, visionOS 27.0, *)
        @Test func questionsGetThePythonStepModelsAnswersInAsManyCalls() async throws {
            let answers = try TinyBundle.assetAnswers()
            #expect(answers.count == 3)
            for answer in answers {
                let session = LanguageModelSession(model: try model())
                let response = try await session.respond(to: answer.question, options: tokens(16))
                #expect(response.content == answer.text)
                #expect(reports.last?.calls == answer.calls)
                #expect(reports.last?.tokensPerCall == answer.tokensPerCall)
                #expect(reports.last?.promptTokens == answer.prompt.count)
            }
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, visionOS 27.0, *)
        @Test func textStreamsAsItIsDecoded() async throws {
            let (answer, tiny) = (try TinyBundle.assetAnswers()[1], try TinyBundle("coreai"))
            let generator = try await SpeculativeGenerator(
                coreAI: tiny.bundle, adapter: "tiny", tokenizer: tiny.tokenizer)
            var expected: [String] = []
            for try await step in generator.stream(tokens: answer.prompt, options: .init(maxTokens: 16))
            where !step.text.isEmpty { expected.append((expected.last ?? "") + step.text) }
            #expect(expected.count > 1)
            let session = LanguageModelSession(model: try model())
            var snapshots: [String] = []
            for try await snapshot in session.streamResponse(to: answer.question, options: tokens(16)) {
                snapshots.append(snapshot.content)
            }
            #expect(snapshots == expected, "one per call that gave text")
            #expect(snapshots.last == answer.text)
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, visionOS 27.0, *)
        @Test(arguments: ["coreai", "coreai-inputs"])
        func theSecondTurnPrefillsOnlyWhatWasAdded(_ name: String) async throws {
            let model = try model(name, marks: true)
            let session = LanguageModelSession(model: model, instructions: "one two three four")
            let first = try await session.respond(to: "abc", options: tokens(6)).content
            let asked = try #require(reports.last)
            #expect(asked.keptTokens == 0)
            let second = try await session.respond(to: "def", options: tokens(6)).content
            let again = try #require(reports.last)
            // What the first turn asked is kept, and as much of its answer as reads the same as text.
            #expect(again.keptTokens >= asked.promptTokens)
            #expect(again.keptTokens < again.promptTokens)
            let fresh = LanguageModelSession(model: model, instructions: "one two three four")
            #expect(try await fresh.respond(to: "abc", options: tokens(6)).content == first)
            let before = Transcript(entries: session.transcript.dropLast(2))
            let other = LanguageModelSession(model: model, transcript: before)
            #expect(try await other.respond(to: "def", options: tokens(6)).content == second)
            #expect(reports.last?.keptTokens == 0, "another session has keys and values of its own")
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, visionOS 27.0, *)
        @Test func prewarmLeavesOnlyThePromptToPrefill() async throws {
            let model = try model(marks: true)
            let instructions = String(repeating: "instructions ", count: 5)
            let session = LanguageModelSession(model: model, instructions: instructions)
            session.prewarm()
            let warm = try await session.respond(to: "abc", options: tokens(4)).content
            // The beginning of text, a marker and the instructions; what follows a conversation's end does not.
            #expect(reports.last?.keptTokens == 2 + instructions.count)
            let cold = LanguageModelSession(model: model, instructions: instructions)
            #expect(try await cold.respond(to: "abc", options: tokens(4)).content == warm)
            #expect(reports.last?.keptTokens == 0)
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, visionOS 27.0, *)
        @Test func requestsThatCannotBeServedSayWhy() async throws {
            let session = LanguageModelSession(model: try model())
            let long = String(repeating: "a", count: 96)
            let says = "the prompt has 97 tokens, the context holds 96"
            await #expect { try await session.respond(to: long) } throws: { error in
                guard case .contextSizeExceeded(let exceeded)? = error as? LanguageModelError else { return false }
                return exceeded.contextSize == 96 && exceeded.tokenCount == 97 && exceeded.debugDescription == says
            }
            #expect(session.transcript.isEmpty, "what was not answered is not part of the conversation")
            let sampled = FoundationModels.GenerationOptions(temperature: 0.7)
            await #expect(throws: SpeculativeError.noLogits) { try await session.respond(to: "a", options: sampled) }
            let output = Transcript.ToolOutput(id: "1", toolName: "tool", segments: [])
            let tools = LanguageModelSession(model: try model(), transcript: Transcript(entries: [.toolOutput(output)]))
            await #expect { try await tools.respond(to: "a") } throws: { error in
                if case .unsupportedTranscriptContent? = error as? LanguageModelError { return true }
                return false
            }
            #expect(throws: SpeculativeError.noCoreAIAsset(adapter: "tiny")) { try model("bundle") }
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, visionOS 27.0, *)
        @Test func samplingFollowsTheOptions() async throws {
            typealias Options = FoundationModels.GenerationOptions
            #expect(try sampler(of: Options()) == .greedy)
            #expect(try sampler(of: Options(temperature: 0)) == .greedy)
            #expect(try sampler(of: Options(samplingMode: .greedy, temperature: 1)) == .greedy)
            #expect(
                try sampler(of: Options(samplingMode: .random(top: 5, seed: 3), temperature: 0.5))
                    == .sampling(Sampling(temperature: 0.5, topK: 5, seed: 3)))
            #expect(
                try sampler(of: Options(samplingMode: .random(probabilityThreshold: 0.9, seed: 4)))
                    == .sampling(Sampling(topP: 0.9, seed: 4)))
            let options = Options(
                samplingMode: .random(top: 30, seed: 7), temperature: 0.8, maximumResponseTokens: 16)
            let session = LanguageModelSession(model: try model("coreai-sampling"))
            let text = try await session.respond(to: "SELECT a", options: options).content
            let tiny = try TinyBundle("coreai-sampling")
            let generator = try await SpeculativeGenerator(
                coreAI: tiny.bundle, tokenizer: Bytes(tiny.tokenizer, marks: false))
            let sampler = Sampler.sampling(try Sampling(temperature: 0.8, topK: 30, seed: 7))
            let drawn = try await generator.generate("SELECT a", options: .init(maxTokens: 16, sampler: sampler))
            #expect(drawn.text == text)
        }
    }
#endif
