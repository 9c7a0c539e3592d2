import Foundation

/// Streams text from one model. The actor confines the model: one call at a time, however many ask.
///
/// A model holds one sequence. Starting a generation takes the model over; the stream that had it ends with
/// `superseded` when it is read on.
public actor SpeculativeGenerator {
    private var model: any StepModel
    private var adapter: BundledAdapter
    let architecture: Architecture
    private var drafter: Drafter
    let tokenizer: any TextTokenizer
    private var current: Generation?
    /// A call may wait for the model, and the actor lets others in meanwhile.
    private let turns = Turns()
    /// Counts of the generation in progress or the last one.
    public private(set) var statistics = GenerationStatistics()

    /// - Parameters:
    ///   - model: handed over; nothing else may use it afterwards.
    ///   - drafter: trees of up to its size; a request may ask for fewer nodes.
    public init(
        model: sending any StepModel, bundle: SpeculativeBundle, adapter: BundledAdapter, drafter: Drafter,
        tokenizer: any TextTokenizer
    ) {
        self.model = model
        self.adapter = adapter
        architecture = bundle.manifest.architecture
        self.drafter = drafter
        self.tokenizer = tokenizer
    }

    /// Streams the answer to a prompt, one element per model call, the prompt's own first.
    ///
    /// A call is made when the next element is asked for, so a reader who stops reading stops the model. A
    /// cancelled task ends the stream: with `cancelled` if a call was under way, else without a finish reason.
    public nonisolated func stream(
        _ prompt: String, options: GenerationOptions = GenerationOptions()
    ) -> AsyncThrowingStream<GenerationStep, any Error> {
        stream({ try self.tokens(of: prompt) }, options)
    }

    /// Streams the answer to token ids, taken as they are.
    public nonisolated func stream(
        tokens: [Int], options: GenerationOptions = GenerationOptions()
    ) -> AsyncThrowingStream<GenerationStep, any Error> {
        stream({ tokens }, options)
    }

    /// The whole answer to a prompt. Throws `cancelled` when its task is cancelled.
    public nonisolated func generate(
        _ prompt: String, options: GenerationOptions = GenerationOptions()
    ) async throws -> GenerationResult {
        try await generate(tokens: tokens(of: prompt), options: options)
    }

    /// The whole answer to token ids, taken as they are. Throws `cancelled` when its task is cancelled.
    public nonisolated func generate(
        tokens: [Int], options: GenerationOptions = GenerationOptions()
    ) async throws -> GenerationResult {
        var (text, generated) = ("", [Int]())
        for try await step in stream(tokens: tokens, options: options) {
            text += step.text
            generated += step.tokens
            if let reason = step.finishReason {
                return GenerationResult(
                    text: text, tokens: generated, promptTokens: tokens.count, finishReason: reason,
                    statistics: await statistics)
            }
        }
        throw SpeculativeError.cancelled
    }

    /// Token ids of a prompt, after the beginning-of-text token where the base has one.
    public nonisolated func tokens(of prompt: String) throws -> [Int] {
        let ids = try tokenizer.encode(prompt)
        return architecture.bosId.map { [$0] + ids } ?? ids
    }

    /// Goes on with another adapter of the same base; a generation in progress ends with `superseded`.
    public func replace(model: sending any StepModel, adapter: BundledAdapter, drafter: Drafter) async {
        await turns.enter()
        self.model = model
        self.adapter = adapter
        self.drafter = drafter
        current = nil
        turns.leave()
    }

    /// Prefills a text ahead of a request that begins with it and reuses it. Does nothing while a generation is in
    /// progress, or one that nobody reads on holds the model.
    public func prewarm(tokens: [Int]) async throws {
        await turns.enter()
        defer { turns.leave() }
        guard current == nil else { return }
        try checkCancellation()
        let kept = model.reusable(tokens)
        guard kept < tokens.count - 1 else { return }
        model.wantsLogits = false
        _ = try await model.prefill(tokens, keeping: kept, isolation: self)
    }

    // MARK: - One stream

    nonisolated func stream(
        _ prompt: @escaping @Sendable () throws -> [Int], _ options: GenerationOptions
    ) -> AsyncThrowingStream<GenerationStep, any Error> {
        let ticket = Ticket()
        return AsyncThrowingStream { try await self.advance(ticket, prompt, options) }
    }

    /// Identifies one stream. Read and written on the generator's actor only.
    private final class Ticket: @unchecked Sendable {
        enum State { case new, running, finished }
        var state = State.new
    }

    /// The generation that holds the model.
    private struct Generation {
        let ticket: Ticket
        var loop: DecodingLoop
        var writer: StepWriter
    }

    /// One model call of the stream with this ticket; nil after its last. Calls of different streams never
    /// interleave inside a step.
    private func advance(
        _ ticket: Ticket, _ prompt: @Sendable () throws -> [Int], _ options: GenerationOptions
    ) async throws -> GenerationStep? {
        await turns.enter()
        defer { turns.leave() }
        guard ticket.state != .finished else { return nil }
        do {
            try checkCancellation()
            let isPrefill = ticket.state == .new
            if isPrefill { current = try begin(ticket, prompt(), options) }
            ticket.state = .running
            guard current?.ticket === ticket else { throw SpeculativeError.superseded }
            let record = try await call(isPrefill: isPrefill)
            if record?.finishReason != nil { finish(ticket) }
            return record
        } catch {
            finish(ticket)
            throw error
        }
    }

    private func begin(_ ticket: Ticket, _ prompt: [Int], _ options: GenerationOptions) throws -> Generation {
        let drafter = try drafter.limited(to: options.numNodes)
        let request = DecodingRequest(
            prompt: prompt, maxTokens: options.maxTokens ?? adapter.maxTokens,
            stopIDs: Set(architecture.eosIds), sampler: options.sampler, reusesText: options.reusesText)
        statistics = GenerationStatistics()
        statistics.promptTokens = prompt.count
        return Generation(
            ticket: ticket, loop: try DecodingLoop(model: model, drafter: drafter, request: request),
            writer: StepWriter(tokenizer, stopStrings: adapter.stopStrings))
    }

    private func call(isPrefill: Bool) async throws -> GenerationStep? {
        let start = ContinuousClock.now
        guard var generation = current, let step = try await generation.loop.next() else { return nil }
        let record = generation.writer.write(step)
        current = generation
        statistics.keptTokens = generation.loop.keptTokens
        let elapsed = (ContinuousClock.now - start).components
        statistics.add(
            record, isPrefill: isPrefill,
            seconds: Double(elapsed.seconds) + Double(elapsed.attoseconds) * 1e-18)
        return record
    }

    private func finish(_ ticket: Ticket) {
        ticket.state = .finished
        if current?.ticket === ticket { current = nil }
    }
}

/// Throws `cancelled` when the current task was cancelled. Back ends call it between long calls.
public func checkCancellation() throws {
    if Task.isCancelled { throw SpeculativeError.cancelled }
}
