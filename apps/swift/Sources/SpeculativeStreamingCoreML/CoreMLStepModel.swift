#if canImport(CoreML)
    import CoreML
    import SpeculativeStreaming

    /// `StepModel` over the prefill and step functions of a package, or of a chain of them. One sequence, one state
    /// per package.
    ///
    /// A commit is lazy: it is remembered here and carried out at the start of the next step call
    /// (`ss_convert/graph/interface.py`).
    public final class CoreMLStepModel: StepModel {
        public let limits: StepLimits
        public var wantsLogits = false
        private let prefillCall: ChainedCall
        private let stepCall: ChainedCall
        private let chunk: Int
        private let states: [MLState]
        private let stepInputs: StepInputs
        private let prefillInputs: PrefillInputs
        private let hasLogits: Bool
        /// Committed positions.
        private var length = 0
        private var pending = PendingCommit()
        /// Nodes kept by the last step, until its commit.
        private var lastKept: [Int]?
        /// Stream logits of all nodes that the last step kept [K, γ, V], from a package that returns them.
        private var lastStreams: MLMultiArray?

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
            guard functions.lora != "inputs" else {
                throw SpeculativeError.backEnd(
                    "adapter '\(adapter.app)' is an input of its functions (ss-convert --lora inputs); "
                        + "this library runs packages with --lora baked")
            }
            let loaded = try await store.functions(functions, of: bundle, options)
            return try CoreMLStepModel(loaded.prefill, loaded.step, functions, adapter.config, options)
        }

        private init(
            _ prefill: FunctionChain, _ step: FunctionChain, _ functions: CoreMLFunctions,
            _ config: SpeculativeConfig, _ options: CoreMLOptions
        ) throws {
            limits = StepLimits(
                numNodes: functions.numNodes, numKept: functions.numKept, numStreams: config.numStreams,
                context: functions.context)
            chunk = functions.chunk
            states = step.makeStates()
            stepInputs = try StepInputs(limits, gated: config.mainAttendsStreams)
            prefillInputs = try PrefillInputs(chunk: chunk, context: functions.context)
            stepCall = try ChainedCall(
                step, inputs: stepInputs.features, reading: ["stream_logits", "logits"],
                usesOutputBackings: options.usesOutputBackings)
            prefillCall = try ChainedCall(
                prefill, inputs: prefillInputs.features, usesOutputBackings: options.usesOutputBackings)
            hasLogits = step.links.last?.function.description.outputDescriptionsByName["logits"] != nil
        }

        /// All but the last prompt token in chunks; the last one as a one-node tree with streams. The state is
        /// reused: masks hide what an earlier text left in it.
        public func prefill(_ tokens: [Int]) throws -> Proposal {
            guard !tokens.isEmpty else { throw SpeculativeError.emptyPrompt }
            guard tokens.count <= limits.context else {
                throw SpeculativeError.promptTooLong(tokens: tokens.count, context: limits.context)
            }
            (length, lastKept, lastStreams) = (0, nil, nil)
            let behind = tokens.count - 1
            for start in stride(from: 0, to: behind, by: chunk) {
                try checkCancellation()
                let part = tokens[start..<min(start + chunk, behind)]
                prefillInputs.fill(part, length: length)
                _ = try prefillCall.predict(states)
                length += part.count
            }
            pending = PendingCommit(slot: length)
            let verified = try step(.rootOnly(tokens[behind]))
            try commit([0])
            return Proposal(
                root: verified.chosen[0], streamLogits: verified.streamLogits, logits: verified.logits)
        }

        public func step(_ tree: DraftTree) throws -> Verified {
            guard tree.count <= limits.numNodes else {
                throw SpeculativeError.tooManyNodes(requested: tree.count, limit: limits.numNodes)
            }
            if wantsLogits, !hasLogits { throw SpeculativeError.noLogits }
            stepInputs.fill(tree, length: length, pending: pending)
            let outputs = try stepCall.predict(states)
            // The call consumed the scratch rows of the step before.
            pending = PendingCommit(slot: length)
            let kept = try output("kept", outputs).readIntegers().prefix { $0 < tree.count }
            lastKept = Array(kept)
            let acceptedNode = try output("accepted", outputs).readIntegers()[0]
            let streams = try output("stream_logits", outputs)
            lastStreams = streams.shape.count == 3 ? streams : nil
            return Verified(
                kept: Array(kept),
                chosen: Array(try output("chosen", outputs).readIntegers().prefix(kept.count)),
                acceptedNode: acceptedNode,
                streamLogits: try streamLogits(ofNode: acceptedNode) ?? streams.readLogits(),
                logits: wantsLogits ? try output("logits", outputs).readLogits(rows: kept.count) : nil)
        }

        /// A package that returns its logits returns the streams of all nodes that it kept: [γ, V] of one, until
        /// the next step. Nil from other packages, whose streams are those of the accepted node.
        public func streamLogits(ofNode node: Int) throws -> LogitRows? {
            guard let streams = lastStreams, let row = lastKept?.firstIndex(of: node) else { return nil }
            return try streams.readLogits(block: row)
        }

        public func commit(_ path: [Int]) throws {
            guard let kept = lastKept else { throw SpeculativeError.backEnd("commit needs a step before it") }
            guard length + path.count <= limits.context else {
                throw SpeculativeError.contextFull(context: limits.context)
            }
            let rows = path.compactMap(kept.firstIndex(of:))
            guard rows.count == path.count else {
                throw SpeculativeError.backEnd("path \(path) holds nodes that were not kept")
            }
            pending = PendingCommit(slot: length, nodes: path, rows: rows)
            length += path.count
            lastKept = nil
        }

        private func output(_ name: String, _ outputs: any MLFeatureProvider) throws -> MLMultiArray {
            guard let array = outputs.featureValue(for: name)?.multiArrayValue else {
                throw SpeculativeError.backEnd("the package's step function has no output '\(name)'")
            }
            return array
        }
    }
#endif
