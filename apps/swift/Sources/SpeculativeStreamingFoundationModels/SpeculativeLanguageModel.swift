// Models of one's own came with the 27 SDKs, whose compiler is Swift 6.4; the stand-in for Linux has them too.
#if canImport(FoundationModels) && (compiler(>=6.4) || os(Linux))
    import FoundationModels
    import SpeculativeStreaming

    /// A bundle and one of its adapters behind `LanguageModelSession`.
    ///
    ///     let model = try SpeculativeLanguageModel(
    ///         bundle, adapter: "sqlctx", tokenizer: tokenizer, backEnd: .coreAI())
    ///     let session = LanguageModelSession(model: model, instructions: "…")
    ///     session.prewarm()
    ///     for try await answer in session.streamResponse(to: prompt) { … }
    ///
    /// The transcript is written with the base's chat template, or its contents joined by line breaks where it has
    /// none: there an application's filled-in prompt template (`BundledAdapter.prompt`) can be sent as the prompt.
    /// Text alone: no tools, no guided generation, no images.
    @available(macOS 27.0, iOS 27.0, watchOS 27.0, visionOS 27.0, *)
    @available(tvOS, unavailable)
    public struct SpeculativeLanguageModel: LanguageModel {
        public typealias Executor = SpeculativeExecutor

        let bundle: SpeculativeBundle
        let adapter: BundledAdapter
        let tokenizer: any TextTokenizer
        let backEnd: SpeculativeBackEnd
        let report: (@Sendable (GenerationStatistics) -> Void)?

        /// Loads nothing yet: a session does at `prewarm`, or with its first prompt.
        ///
        /// - Parameters:
        ///   - adapter: nil for the bundle's only one.
        ///   - report: called with the counts of every finished answer.
        /// - Throws: `adapterNotNamed`, `unknownAdapter`, `noCoreAIAsset` or `noCoreMLPackage`.
        public init(
            _ bundle: SpeculativeBundle, adapter name: String? = nil, tokenizer: any TextTokenizer,
            backEnd: SpeculativeBackEnd, report: (@Sendable (GenerationStatistics) -> Void)? = nil
        ) throws {
            adapter = try bundle.adapter(name)
            try backEnd.check(adapter)
            self.bundle = bundle
            self.tokenizer = tokenizer
            self.backEnd = backEnd
            self.report = report
        }

        public var capabilities: LanguageModelCapabilities { LanguageModelCapabilities([]) }

        public var executorConfiguration: SpeculativeExecutor.Configuration {
            SpeculativeExecutor.Configuration(bundle: bundle.url, adapter: adapter.app, backEnd: backEnd)
        }

        /// A generator with keys and values of its own; loaded functions are shared by all of a process.
        func makeGenerator() async throws -> SpeculativeGenerator {
            try await backEnd.open(bundle, adapter: adapter.app, tokenizer: tokenizer)
        }

        /// Positions that the cache holds.
        var context: Int { backEnd.functions(of: adapter)?.context ?? 0 }
    }
#endif
