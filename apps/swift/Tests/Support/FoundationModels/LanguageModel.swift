import Foundation

public protocol LanguageModel: Sendable {
    associatedtype Executor: LanguageModelExecutor where Self == Self.Executor.Model

    var capabilities: LanguageModelCapabilities { get }
    var executorConfiguration: Self.Executor.Configuration { get }
}

public protocol LanguageModelExecutor: Sendable {
    associatedtype Configuration: Hashable, Sendable
    associatedtype Model: LanguageModel

    func prewarm(model: Self.Model, transcript: Transcript)

    init(configuration: Self.Configuration) throws

    func respond(
        to request: LanguageModelExecutorGenerationRequest, model: Self.Model,
        streamingInto channel: LanguageModelExecutorGenerationChannel
    ) async throws
}

extension LanguageModelExecutor {
    public func prewarm(model: Self.Model, transcript: Transcript) {}
}

public struct LanguageModelCapabilities: Sendable {
    public struct Capability: Sendable, Hashable {
        private let name: String

        public static var vision: Capability { Capability(name: "vision") }
        public static var guidedGeneration: Capability { Capability(name: "guidedGeneration") }
        public static var reasoning: Capability { Capability(name: "reasoning") }
        public static var toolCalling: Capability { Capability(name: "toolCalling") }
    }

    private let capabilities: [Capability]

    public init(_ capabilities: [Capability]) { self.capabilities = capabilities }

    public func contains(_ capability: Capability) -> Bool { capabilities.contains(capability) }
}

public struct LanguageModelExecutorGenerationRequest: Sendable {
    public var id: UUID
    public var transcript: Transcript
    public var generationOptions: GenerationOptions
}

public struct LanguageModelExecutorGenerationChannel: AsyncSequence, Sendable {
    public struct Event: Sendable {
        let action: Response.Action

        public static func response(entryID: String? = nil, action: Response.Action) -> Event { Event(action: action) }
    }

    public enum Response {
        public struct Action: Sendable {
            enum Kind: Sendable {
                case text(String, tokenCount: Int)
                case usage(Usage)
            }

            let kind: Kind

            public static func appendText(_ text: String, segmentID: String? = nil, tokenCount: Int) -> Action {
                Action(kind: .text(text, tokenCount: tokenCount))
            }

            public static func updateUsage(input: Usage.Input, output: Usage.Output) -> Action {
                Action(kind: .usage(Usage(input: input, output: output)))
            }
        }
    }

    public struct Usage: Sendable {
        public struct Input: Sendable {
            public var totalTokenCount: Int
            public var cachedTokenCount: Int

            public init(totalTokenCount: Int, cachedTokenCount: Int) {
                (self.totalTokenCount, self.cachedTokenCount) = (totalTokenCount, cachedTokenCount)
            }
        }

        public struct Output: Sendable {
            public var totalTokenCount: Int
            public var reasoningTokenCount: Int

            public init(totalTokenCount: Int, reasoningTokenCount: Int) {
                (self.totalTokenCount, self.reasoningTokenCount) = (totalTokenCount, reasoningTokenCount)
            }
        }

        public var input: Input
        public var output: Output
    }

    private let events: AsyncThrowingStream<Event, any Error>
    private let continuation: AsyncThrowingStream<Event, any Error>.Continuation

    public init() { (events, continuation) = AsyncThrowingStream.makeStream() }

    public func makeAsyncIterator() -> AsyncThrowingStream<Event, any Error>.Iterator { events.makeAsyncIterator() }

    public func send(_ event: Event) async { continuation.yield(event) }

    /// What the session does when `respond` has returned or thrown.
    func finish(throwing error: (any Error)? = nil) { continuation.finish(throwing: error) }
}

public enum LanguageModelError: LocalizedError {
    case contextSizeExceeded(ContextSizeExceeded)
    case unsupportedTranscriptContent(UnsupportedTranscriptContent)

    public struct ContextSizeExceeded: Sendable {
        public let contextSize: Int
        public let tokenCount: Int
        public let debugDescription: String

        public init(contextSize: Int, tokenCount: Int, debugDescription: String) {
            (self.contextSize, self.tokenCount) = (contextSize, tokenCount)
            self.debugDescription = debugDescription
        }
    }

    public struct UnsupportedTranscriptContent: Sendable {
        public let unsupportedContent: [Transcript.Entry]
        public let debugDescription: String

        public init(unsupportedContent: [Transcript.Entry], debugDescription: String) {
            self.unsupportedContent = unsupportedContent
            self.debugDescription = debugDescription
        }
    }

    public var errorDescription: String? {
        switch self {
        case .contextSizeExceeded(let error): return error.debugDescription
        case .unsupportedTranscriptContent(let error): return error.debugDescription
        }
    }
}

public struct GenerationOptions: Sendable, Equatable {
    public struct SamplingMode: Sendable, Equatable {
        public enum Kind: Sendable, Equatable {
            case greedy
            case randomTopK(Int, seed: UInt64?)
            case randomProbabilityThreshold(Double, seed: UInt64?)
        }

        public let kind: Kind

        public static var greedy: SamplingMode { SamplingMode(kind: .greedy) }

        public static func random(top k: Int, seed: UInt64? = nil) -> SamplingMode {
            SamplingMode(kind: .randomTopK(k, seed: seed))
        }

        public static func random(probabilityThreshold: Double, seed: UInt64? = nil) -> SamplingMode {
            SamplingMode(kind: .randomProbabilityThreshold(probabilityThreshold, seed: seed))
        }
    }

    public var samplingMode: SamplingMode?
    public var temperature: Double?
    public var maximumResponseTokens: Int?

    public init(samplingMode: SamplingMode? = nil, temperature: Double? = nil, maximumResponseTokens: Int? = nil) {
        (self.samplingMode, self.temperature) = (samplingMode, temperature)
        self.maximumResponseTokens = maximumResponseTokens
    }
}
