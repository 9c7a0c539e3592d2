#if canImport(FoundationModels) && (compiler(>=6.4) || os(Linux))
    import Foundation
    import FoundationModels
    import SpeculativeStreaming

    /// Answers a session's prompts. A session has its own, with keys and values of its own: what a transcript shares
    /// with what was computed before is kept, the rest is prefilled.
    @available(macOS 27.0, iOS 27.0, watchOS 27.0, visionOS 27.0, *)
    @available(tvOS, unavailable)
    public struct SpeculativeExecutor: LanguageModelExecutor {
        public typealias Model = SpeculativeLanguageModel

        /// What an executor is found by.
        public struct Configuration: Hashable, Sendable {
            let bundle: URL
            let adapter: String
            let backEnd: SpeculativeBackEnd
        }

        private let conversation = Conversation()
        private let warming = Warming()

        public init(configuration: Configuration) {}

        /// Loads the functions and prefills the transcript so far. What goes wrong shows again, with the first prompt.
        public func prewarm(model: SpeculativeLanguageModel, transcript: Transcript) {
            warming.begin { [conversation] in try? await conversation.prewarm(model, transcript) }
        }

        /// Streams the answer to the transcript, one event per model call that gave text.
        ///
        /// - Throws: `LanguageModelError.contextSizeExceeded` or `unsupportedTranscriptContent`; `SpeculativeError`
        ///   for everything else, `CancellationError` when the task is cancelled.
        public func respond(
            to request: LanguageModelExecutorGenerationRequest, model: SpeculativeLanguageModel,
            streamingInto channel: LanguageModelExecutorGenerationChannel
        ) async throws {
            await warming.end()
            try await conversation.respond(to: request, model, channel)
        }
    }

    /// The last prewarm, which the next prompt waits for.
    private final class Warming: @unchecked Sendable {
        private let lock = NSLock()
        private var task: Task<Void, Never>?

        func begin(_ work: @escaping @Sendable () async -> Void) {
            lock.withLock {
                let earlier = task
                task = Task {
                    await earlier?.value
                    await work()
                }
            }
        }

        func end() async { await lock.withLock { task }?.value }
    }

    /// The generator of one session, opened at its first use, and whose turn it is.
    @available(macOS 27.0, iOS 27.0, watchOS 27.0, visionOS 27.0, *)
    @available(tvOS, unavailable)
    actor Conversation {
        private var generator: SpeculativeGenerator?
        private let turns = Turns()

        func prewarm(_ model: SpeculativeLanguageModel, _ transcript: Transcript) async throws {
            await turns.enter()
            defer { turns.leave() }
            let generator = try await opened(model)
            let messages = try chatMessages(of: transcript)
            guard !messages.isEmpty else { return }
            let tokens = try generator.tokens(of: messages)
            guard !tokens.isEmpty, tokens.count <= model.context else { return }
            try await generator.prewarm(tokens: tokens)
        }

        func respond(
            to request: LanguageModelExecutorGenerationRequest, _ model: SpeculativeLanguageModel,
            _ channel: LanguageModelExecutorGenerationChannel
        ) async throws {
            await turns.enter()
            defer { turns.leave() }
            let options = SpeculativeStreaming.GenerationOptions(
                maxTokens: request.generationOptions.maximumResponseTokens,
                sampler: try sampler(of: request.generationOptions), reusesText: true)
            let messages = try chatMessages(of: request.transcript)
            let generator = try await opened(model)
            let tokens = try generator.tokens(of: messages)
            guard tokens.count <= model.context else {
                let error = SpeculativeError.promptTooLong(tokens: tokens.count, context: model.context)
                throw LanguageModelError.contextSizeExceeded(
                    .init(contextSize: model.context, tokenCount: tokens.count, debugDescription: error.description))
            }
            do {
                try await stream(tokens, options, generator, channel)
                model.report?(await generator.statistics)
            } catch SpeculativeError.cancelled {
                throw CancellationError()
            }
        }

        private func stream(
            _ tokens: [Int], _ options: SpeculativeStreaming.GenerationOptions, _ generator: SpeculativeGenerator,
            _ channel: LanguageModelExecutorGenerationChannel
        ) async throws {
            // Tokens whose text is held back (half a character, the start of a stop string) count with the text.
            var tokenCount = 0
            for try await step in generator.stream(tokens: tokens, options: options) {
                tokenCount += step.tokens.count
                guard !step.text.isEmpty else { continue }
                await channel.send(.response(action: .appendText(step.text, tokenCount: tokenCount)))
                tokenCount = 0
            }
            try Task.checkCancellation()
            let counts = await generator.statistics
            await channel.send(
                .response(
                    action: .updateUsage(
                        input: .init(totalTokenCount: counts.promptTokens, cachedTokenCount: counts.keptTokens),
                        output: .init(totalTokenCount: counts.generatedTokens, reasoningTokenCount: 0))))
        }

        private func opened(_ model: SpeculativeLanguageModel) async throws -> SpeculativeGenerator {
            if let generator { return generator }
            let fresh = try await model.makeGenerator()
            generator = fresh
            return fresh
        }
    }
#endif
