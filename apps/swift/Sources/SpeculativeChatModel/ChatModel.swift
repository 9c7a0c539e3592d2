import Foundation
import SpeculativeStreaming

// Swift 6.0's Observation library does not link on Linux; the views that observe are not there either.
#if canImport(Darwin)
    import Observation
#endif

/// What the app shows of one answer: text by who wrote it, and the counts so far.
public struct Answer: Sendable, Equatable {
    public struct Segment: Sendable, Equatable, Identifiable {
        public let id: Int
        public let text: String
        /// Whether the text was drafted and accepted, or is the model's own token.
        public let isDrafted: Bool
    }

    public private(set) var segments: [Segment] = []
    public private(set) var statistics = GenerationStatistics()
    public private(set) var isFinished = false

    public init() {}

    public var text: String { segments.map(\.text).joined() }

    /// Adds one model call's text.
    mutating func add(_ step: GenerationStep, _ statistics: GenerationStatistics) {
        append(step.draftedText, isDrafted: true)
        append(String(step.text.dropFirst(step.draftedText.count)), isDrafted: false)
        self.statistics = statistics
        isFinished = step.finishReason != nil
    }

    private mutating func append(_ text: String, isDrafted: Bool) {
        guard !text.isEmpty else { return }
        segments.append(Segment(id: segments.count, text: text, isDrafted: isDrafted))
    }
}

/// The state of the chat window. Knows the library, not Core ML: the app hands in how a generator is opened.
#if canImport(Darwin)
    @Observable
#endif
@MainActor
public final class ChatModel {
    public typealias Open = @Sendable (_ bundle: SpeculativeBundle, _ adapter: String) async throws -> SpeculativeGenerator

    public private(set) var adapters: [String] = []
    public var adapter: String? { didSet { if adapter != oldValue { generator = nil } } }
    public private(set) var speculative = Answer()
    public private(set) var plain = Answer()
    public private(set) var isRunning = false
    /// The bundle's or the opening's problem, in one line.
    public private(set) var problem: String?
    /// Also answer one token per call, to compare.
    public var comparesWithPlain = false

    private let open: Open
    private var bundle: SpeculativeBundle?
    private var generator: SpeculativeGenerator?
    private var task: Task<Void, Never>?

    public init(open: @escaping Open) { self.open = open }

    /// Opens a bundle folder and selects its first adapter.
    public func choose(_ folder: URL) {
        stop()
        do {
            let bundle = try SpeculativeBundle(contentsOf: folder)
            (self.bundle, generator, problem) = (bundle, nil, nil)
            adapters = bundle.manifest.adapters.keys.sorted()
            adapter = adapters.first
        } catch {
            (bundle, adapters, adapter) = (nil, [], nil)
            problem = Self.line(error)
        }
    }

    /// Names of the prompt's fields for the chosen adapter, in order.
    public var templateFields: [String] {
        adapter.flatMap { bundle?.manifest.adapters[$0]?.promptFields } ?? []
    }

    /// Answers the filled prompt template. Waits until the answer is complete or stopped.
    public func ask(_ fields: [String: String], maxTokens: Int? = nil) async {
        guard let bundle, let adapter, !isRunning else { return }
        isRunning = true
        (speculative, plain, problem) = (Answer(), Answer(), nil)
        let task = Task {
            do {
                let generator = try await self.opened(bundle, adapter)
                let prompt = try generator.tokens(of: bundle.adapter(adapter).prompt(fields))
                try await self.run(generator, prompt, GenerationOptions(maxTokens: maxTokens), \.speculative)
                guard self.comparesWithPlain else { return }
                try await self.run(generator, prompt, GenerationOptions(maxTokens: maxTokens).plain, \.plain)
            } catch {
                self.problem = Self.line(error)
            }
        }
        self.task = task
        await task.value
        isRunning = false
    }

    /// Ends the answer in progress.
    public func stop() { task?.cancel() }

    private func opened(_ bundle: SpeculativeBundle, _ adapter: String) async throws -> SpeculativeGenerator {
        if let generator { return generator }
        let fresh = try await open(bundle, adapter)
        generator = fresh
        return fresh
    }

    private func run(
        _ generator: SpeculativeGenerator, _ prompt: [Int], _ options: GenerationOptions,
        _ answer: ReferenceWritableKeyPath<ChatModel, Answer>
    ) async throws {
        for try await step in generator.stream(tokens: prompt, options: options) {
            self[keyPath: answer].add(step, await generator.statistics)
        }
        if !self[keyPath: answer].isFinished { throw SpeculativeError.cancelled }
    }

    private static func line(_ error: any Error) -> String {
        (error as? SpeculativeError)?.description ?? error.localizedDescription
    }
}
