/// One model call's outcome as a reader sees it; the first is the prefill's.
public struct GenerationStep: Sendable, Equatable {
    /// The new segment, ready to show. Text that may turn out to be the start of a stop string, or half a
    /// character, waits for a later step.
    public let text: String
    /// The part of `text` that came from accepted draft tokens (the rest is the model's own token). What was
    /// held back from an earlier step counts as drafted when the token that released it was.
    public let draftedText: String
    /// New token ids, an end token included.
    public let tokens: [Int]
    /// How many of them, from the front, were drafted.
    public let numDrafted: Int
    public let finishReason: FinishReason?
}

/// Counts of a generation so far.
public struct GenerationStatistics: Sendable, Equatable, Codable {
    /// Model calls after the prefill.
    public var calls = 0
    public var generatedTokens = 0
    public var draftedTokens = 0
    public var promptTokens = 0
    /// Tokens of the prompt whose keys and values were kept from the text before.
    public var keptTokens = 0
    public var prefillSeconds = 0.0
    public var decodeSeconds = 0.0

    public init() {}

    /// Generated tokens but the first (the prefill's), per call after the prefill; nil without one.
    public var tokensPerCall: Double? {
        calls == 0 ? nil : Double(generatedTokens - 1) / Double(calls)
    }

    /// Generated tokens but the first per second of decoding; nil before there are any.
    public var tokensPerSecond: Double? {
        decodeSeconds > 0 && calls > 0 ? Double(generatedTokens - 1) / decodeSeconds : nil
    }

    /// Adds one call that took `seconds`.
    public mutating func add(_ step: GenerationStep, isPrefill: Bool, seconds: Double) {
        generatedTokens += step.tokens.count
        draftedTokens += step.numDrafted
        if isPrefill {
            prefillSeconds += seconds
        } else {
            calls += 1
            decodeSeconds += seconds
        }
    }
}

/// A finished generation.
public struct GenerationResult: Sendable, Equatable {
    /// Without the end token, which `tokens` holds if one was generated.
    public let text: String
    public let tokens: [Int]
    public let promptTokens: Int
    public let finishReason: FinishReason
    public let statistics: GenerationStatistics
}

/// What a generation is asked for, besides the prompt.
public struct GenerationOptions: Sendable {
    /// nil: the adapter's own limit.
    public var maxTokens: Int?
    /// nil: the adapter's tree; 1: plain decoding.
    public var numNodes: Int?
    public var sampler: Sampler
    /// Keep what the model still holds of the prompt's beginning from the text before it, and prefill the rest.
    public var reusesText: Bool

    public init(
        maxTokens: Int? = nil, numNodes: Int? = nil, sampler: Sampler = .greedy, reusesText: Bool = false
    ) {
        self.maxTokens = maxTokens
        self.numNodes = numNodes
        self.sampler = sampler
        self.reusesText = reusesText
    }

    /// The same request without drafts: one token per call.
    public var plain: GenerationOptions {
        var options = self
        options.numNodes = 1
        return options
    }
}

/// Turns the decoding loop's steps into text, one token at a time: a stop string ends the text within a step.
struct StepWriter {
    private var detokenizer: Detokenizer
    private var stops: StopStrings

    init(_ tokenizer: any TextTokenizer, stopStrings: [String]) {
        detokenizer = Detokenizer(tokenizer)
        stops = StopStrings(stopStrings)
    }

    mutating func write(_ step: DecodingStep) -> GenerationStep {
        var (text, drafted) = ("", "")
        for (index, token) in step.tokens.enumerated() {
            let new = stops.add(detokenizer.add(token))
            text += new.text
            if index < step.numDrafted { drafted = text }
            if new.stopped { return record(step, text, drafted, count: index + 1, .stop) }
        }
        if step.finishReason != nil {
            let rest = stops.add(detokenizer.finish())
            text += rest.text
            if !rest.stopped { text += stops.finish() }
        }
        return record(step, text, drafted, count: step.tokens.count, step.finishReason)
    }

    private func record(
        _ step: DecodingStep, _ text: String, _ drafted: String, count: Int, _ reason: FinishReason?
    ) -> GenerationStep {
        GenerationStep(
            text: text, draftedText: drafted, tokens: Array(step.tokens.prefix(count)),
            numDrafted: min(count, step.numDrafted), finishReason: reason)
    }
}
