#if canImport(CoreAI)
    import CoreAI
    import SpeculativeStreaming

    /// `StepModel` over the prefill and step functions of an asset, or of a chain of them. One sequence.
    @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
    public final class CoreAIStepModel: StepModel {
        private let model: FunctionStepModel<CoreAICalls>

        public var limits: StepLimits { model.limits }

        public var wantsLogits: Bool {
            get { model.wantsLogits }
            set { model.wantsLogits = newValue }
        }

        /// Calls of the two functions so far.
        package var calls: (prefill: Int, step: Int) { model.functions.calls }

        /// Loads an adapter's functions. The first load on a device specialises its assets, which takes long.
        ///
        /// Throws `noCoreAIAsset`, or `backEnd` with Core AI's message.
        public static func open(
            _ adapter: BundledAdapter, of bundle: SpeculativeBundle, options: CoreAIOptions = CoreAIOptions(),
            store: AssetStore = .shared
        ) async throws -> sending CoreAIStepModel {
            guard let functions = adapter.coreai else {
                throw SpeculativeError.noCoreAIAsset(adapter: adapter.app)
            }
            try functions.checkBaked(of: adapter)
            let loaded = try await store.functions(functions, of: bundle, options)
            return try CoreAIStepModel(loaded.prefill, loaded.step, functions, adapter.config, bundle)
        }

        private init(
            _ prefill: FunctionChain, _ step: FunctionChain, _ functions: StepFunctions,
            _ config: SpeculativeConfig, _ bundle: SpeculativeBundle
        ) throws {
            let layers = try functions.cache == .inputs ? functions.layers(config, bundle) : nil
            let calls = try CoreAICalls(prefill, step, functions, config, layers)
            model = FunctionStepModel(
                calls, limits: functions.limits(config), chunk: functions.chunk,
                hasLogits: step.links.last?.function.outputNames.contains("logits") == true)
        }

        public func reusable(_ tokens: [Int]) -> Int { model.reusable(tokens) }

        public func prefill(
            _ tokens: [Int], keeping kept: Int = 0, isolation: isolated (any Actor)? = #isolation
        ) async throws -> Proposal {
            try await model.prefill(tokens, keeping: kept, isolation: isolation)
        }

        public func step(
            _ tree: DraftTree, isolation: isolated (any Actor)? = #isolation
        ) async throws -> Verified {
            try await model.step(tree, isolation: isolation)
        }

        public func streamLogits(ofNode node: Int) throws -> LogitRows? { try model.streamLogits(ofNode: node) }

        public func commit(_ path: [Int]) throws { try model.commit(path) }
    }

    extension StepFunctions {
        /// The layers of every part, and the first one into which only kept nodes go.
        ///
        /// Throws `backEnd` where the manifest does not say how many layers there are.
        fileprivate func layers(
            _ config: SpeculativeConfig, _ bundle: SpeculativeBundle
        ) throws -> (parts: [Range<Int>], firstMSA: Int) {
            guard let all = bundle.manifest.architecture.numLayers, let streamed = config.numMsaLayers else {
                throw SpeculativeError.backEnd("the manifest does not say how many layers the model has")
            }
            let parts = packages.count > 1 ? (chain ?? []).map { $0.layers[0]..<$0.layers[1] } : [0..<all]
            return (parts, all - streamed)
        }
    }
#endif
