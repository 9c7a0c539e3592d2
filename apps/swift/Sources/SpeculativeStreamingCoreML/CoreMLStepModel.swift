#if canImport(CoreML)
    import CoreML
    import SpeculativeStreaming

    /// `StepModel` over the prefill and step functions of a package, or of a chain of them. One sequence, one state
    /// per package.
    public final class CoreMLStepModel: StepModel {
        private let model: FunctionStepModel<CoreMLCalls>

        public var limits: StepLimits { model.limits }

        public var wantsLogits: Bool {
            get { model.wantsLogits }
            set { model.wantsLogits = newValue }
        }

        /// Loads an adapter's functions, compiling its packages the first time.
        ///
        /// Throws `noCoreMLPackage`, or `backEnd` with Core ML's message.
        public static func open(
            _ adapter: BundledAdapter, of bundle: SpeculativeBundle, options: CoreMLOptions = CoreMLOptions(),
            store: FunctionStore = .shared
        ) async throws -> sending CoreMLStepModel {
            guard let functions = adapter.coreml else {
                throw SpeculativeError.noCoreMLPackage(adapter: adapter.app)
            }
            try functions.checkBaked(of: adapter)
            let loaded = try await store.functions(functions, of: bundle, options)
            return try CoreMLStepModel(loaded.prefill, loaded.step, functions, adapter.config, options)
        }

        private init(
            _ prefill: FunctionChain, _ step: FunctionChain, _ functions: StepFunctions,
            _ config: SpeculativeConfig, _ options: CoreMLOptions
        ) throws {
            let limits = functions.limits(config)
            let calls = try CoreMLCalls(
                prefill, step, limits, chunk: functions.chunk, gated: config.mainAttendsStreams, options)
            model = FunctionStepModel(
                calls, limits: limits, chunk: functions.chunk,
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

    /// The functions of one sequence: its states, and memory for what goes in and out.
    final class CoreMLCalls: FunctionCalls {
        let movesRows = true
        private let prefillCall: ChainedCall
        private let stepCall: ChainedCall
        private let states: [MLState]
        private let stepInputs: StepInputs<MultiArrayInput>
        private let prefillInputs: PrefillInputs<MultiArrayInput>

        init(
            _ prefill: FunctionChain, _ step: FunctionChain, _ limits: StepLimits, chunk: Int, gated: Bool,
            _ options: CoreMLOptions
        ) throws {
            states = step.makeStates()
            stepInputs = try StepInputs(limits, gated: gated)
            prefillInputs = try PrefillInputs(chunk: chunk, context: limits.context)
            stepCall = try ChainedCall(
                step, inputs: stepInputs.features, reading: ["stream_logits", "logits"],
                usesOutputBackings: options.usesOutputBackings)
            prefillCall = try ChainedCall(
                prefill, inputs: prefillInputs.features, usesOutputBackings: options.usesOutputBackings)
        }

        func prefill(_ part: ArraySlice<Int>, length: Int, isolation: isolated (any Actor)?) async throws {
            prefillInputs.fill(part, length: length)
            _ = try prefillCall.predict(states)
        }

        func step(
            _ tree: DraftTree, length: Int, pending: PendingCommit, isolation: isolated (any Actor)?
        ) async throws -> CoreMLOutputs {
            stepInputs.fill(tree, length: length, pending: pending)
            return CoreMLOutputs(features: try stepCall.predict(states))
        }

        func commit(_ accepted: PendingCommit) throws {}
    }

    /// What a step function put out.
    struct CoreMLOutputs: StepOutputs {
        let features: any MLFeatureProvider

        func integers(_ name: String) throws -> [Int] { try array(name).readIntegers() }

        func logits(_ name: String, rows: Int?, block: Int) throws -> LogitRows {
            try array(name).readLogits(rows: rows, block: block)
        }

        func hasStreamsOfEveryNode() throws -> Bool { try array("stream_logits").shape.count == 3 }

        private func array(_ name: String) throws -> MLMultiArray {
            guard let array = features.featureValue(for: name)?.multiArrayValue else {
                throw SpeculativeError.backEnd("the package's step function has no output '\(name)'")
            }
            return array
        }
    }
#endif
