import Foundation

/// A conversation with a model: the whole transcript goes to its executor with every prompt. One executor per
/// session and configuration, made at its first use.
public final class LanguageModelSession: @unchecked Sendable {
    public struct Response<Content: Sendable>: Sendable {
        public let content: Content
        public let usage: LanguageModelExecutorGenerationChannel.Usage?
    }

    public struct ResponseStream<Content: Sendable>: AsyncSequence, Sendable {
        public struct Snapshot: Sendable {
            public let content: Content
        }

        let snapshots: AsyncThrowingStream<Snapshot, any Error>

        public func makeAsyncIterator() -> AsyncThrowingStream<Snapshot, any Error>.Iterator {
            snapshots.makeAsyncIterator()
        }
    }

    public private(set) var transcript: Transcript
    private let executor: any SessionExecutor

    public init<Model: LanguageModel>(model: Model, transcript: Transcript) {
        executor = ExecutorOfSession(model)
        self.transcript = transcript
    }

    public convenience init(model: some LanguageModel, instructions: String? = nil) {
        let segments = instructions.map { [Transcript.Segment.text(Transcript.TextSegment(content: $0))] }
        let entries = segments.map { Transcript.Instructions(segments: $0, toolDefinitions: []) }
        self.init(model: model, transcript: Transcript(entries: entries.map { [.instructions($0)] } ?? []))
    }

    public func prewarm(promptPrefix: String? = nil) { executor.prewarm(transcript) }

    public func respond(
        to prompt: String, options: GenerationOptions = GenerationOptions()
    ) async throws -> Response<String> {
        var (text, usage) = ("", LanguageModelExecutorGenerationChannel.Usage?.none)
        for try await event in start(prompt, options) {
            switch event.action.kind {
            case .text(let new, _): text += new
            case .usage(let new): usage = new
            }
        }
        remember(prompt, text)
        return Response(content: text, usage: usage)
    }

    public func streamResponse(
        to prompt: String, options: GenerationOptions = GenerationOptions()
    ) -> sending ResponseStream<String> {
        let (snapshots, continuation) = AsyncThrowingStream.makeStream(of: ResponseStream<String>.Snapshot.self)
        let task = Task {
            do {
                var text = ""
                for try await event in start(prompt, options) {
                    guard case .text(let new, _) = event.action.kind else { continue }
                    text += new
                    continuation.yield(ResponseStream.Snapshot(content: text))
                }
                remember(prompt, text)
                continuation.finish()
            } catch {
                continuation.finish(throwing: error)
            }
        }
        continuation.onTermination = { if case .cancelled = $0 { task.cancel() } }
        return ResponseStream(snapshots: snapshots)
    }

    /// Starts the model's answer; the channel ends with it.
    private func start(_ prompt: String, _ options: GenerationOptions) -> LanguageModelExecutorGenerationChannel {
        var asked = transcript
        asked.append(.prompt(Transcript.Prompt(segments: [.text(Transcript.TextSegment(content: prompt))])))
        let request = LanguageModelExecutorGenerationRequest(
            id: UUID(), transcript: asked, generationOptions: options)
        let (channel, executor) = (LanguageModelExecutorGenerationChannel(), executor)
        Task {
            do {
                try await executor.respond(to: request, channel)
                channel.finish()
            } catch {
                channel.finish(throwing: error)
            }
        }
        return channel
    }

    private func remember(_ prompt: String, _ answer: String) {
        transcript.append(.prompt(Transcript.Prompt(segments: [.text(Transcript.TextSegment(content: prompt))])))
        transcript.append(.response(Transcript.Response(segments: [.text(Transcript.TextSegment(content: answer))])))
    }
}

private protocol SessionExecutor: Sendable {
    func prewarm(_ transcript: Transcript)

    func respond(
        to request: LanguageModelExecutorGenerationRequest, _ channel: LanguageModelExecutorGenerationChannel
    ) async throws
}

/// Makes a session's executor at its first use.
private final class ExecutorOfSession<Model: LanguageModel>: SessionExecutor, @unchecked Sendable {
    private let model: Model
    private let lock = NSLock()
    private var executor: Model.Executor?

    init(_ model: Model) { self.model = model }

    func prewarm(_ transcript: Transcript) { try? opened().prewarm(model: model, transcript: transcript) }

    func respond(
        to request: LanguageModelExecutorGenerationRequest, _ channel: LanguageModelExecutorGenerationChannel
    ) async throws {
        try await opened().respond(to: request, model: model, streamingInto: channel)
    }

    private func opened() throws -> Model.Executor {
        try lock.withLock {
            let found = try executor ?? Model.Executor(configuration: model.executorConfiguration)
            executor = found
            return found
        }
    }
}
