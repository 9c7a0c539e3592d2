#if canImport(CoreAI)
    import CoreAI
    import SpeculativeStreaming

    /// The functions of one sequence: its keys and values, and memory for what goes in.
    @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
    final class CoreAICalls: FunctionCalls {
        let movesRows: Bool
        private(set) var calls = (prefill: 0, step: 0)
        private let prefillChain: FunctionChain
        private let stepChain: FunctionChain
        private let stepInputs: StepInputs<ArrayInput>
        private let prefillInputs: PrefillInputs<ArrayInput>
        /// Every part's state; nil while a call has it.
        private var states: [NDArray?] = []
        /// Every part's keys and values where they are an input.
        private var hosted: [HostCache] = []
        /// Every part's rows of the last step.
        private var newRows: [NDArray] = []

        /// - Parameter layers: of every part, where keys and values are an input; nil for a state.
        init(
            _ prefill: FunctionChain, _ step: FunctionChain, _ functions: StepFunctions,
            _ config: SpeculativeConfig, _ layers: (parts: [Range<Int>], firstMSA: Int)?
        ) throws {
            (prefillChain, stepChain) = (prefill, step)
            movesRows = layers == nil
            stepInputs = try StepInputs(
                functions.limits(config), gated: config.mainAttendsStreams, commits: layers == nil)
            prefillInputs = try PrefillInputs(chunk: functions.chunk, context: functions.context)
            if let layers {
                hosted = try zip(step.links, layers.parts).map { link, part in
                    HostCache(
                        shape: try link.function.cacheShape(), layers: part, firstMSALayer: layers.firstMSA)
                }
            } else {
                states = try step.links.map { try $0.function.makeState() }
            }
            let own: Set<String> = layers == nil ? [] : [AssetFunction.cache]
            try step.check(inputs: Set(stepInputs.arrays.keys), own: own)
            try prefill.check(inputs: Set(prefillInputs.arrays.keys), own: own)
        }

        func prefill(_ part: ArraySlice<Int>, length: Int, isolation: isolated (any Actor)?) async throws {
            calls.prefill += 1
            prefillInputs.fill(part, length: length)
            let outputs = try await predict(prefillChain, prefillInputs.arrays.mapValues(\.array), isolation)
            for (number, rows) in try rows(of: outputs).enumerated() {
                hosted[number].write(rows, count: part.count, slot: length)
            }
        }

        func step(
            _ tree: DraftTree, length: Int, pending: PendingCommit, isolation: isolated (any Actor)?
        ) async throws -> CoreAIOutputs {
            calls.step += 1
            stepInputs.fill(tree, length: length, pending: pending)
            let outputs = try await predict(stepChain, stepInputs.arrays.mapValues(\.array), isolation)
            newRows = try rows(of: outputs)
            return CoreAIOutputs(arrays: outputs.last ?? [:])
        }

        func commit(_ accepted: PendingCommit) throws {
            for (number, rows) in newRows.enumerated() { hosted[number].commit(rows, accepted) }
        }

        /// Runs the links one after another; the outputs of each.
        private func predict(
            _ chain: FunctionChain, _ inputs: [String: NDArray], _ isolation: isolated (any Actor)?
        ) async throws -> [[String: NDArray]] {
            var outputs: [[String: NDArray]] = []
            for (part, link) in chain.links.enumerated() {
                // What the link before put out goes before an input of the whole function of the same name.
                var given = link.feeds?.compactMapValues { outputs.last?[$0] ?? inputs[$0] } ?? inputs
                if movesRows {
                    outputs.append(try await changeState(of: part, link.function, given, isolation))
                } else {
                    given[AssetFunction.cache] = hosted[part].array
                    outputs.append(try await link.function.run(given))
                }
            }
            return outputs
        }

        /// The state is moved out of `states` and back, so that nothing else refers to it while it changes.
        private func changeState(
            of part: Int, _ function: AssetFunction, _ inputs: [String: NDArray], _ isolation: isolated (any Actor)?
        ) async throws -> [String: NDArray] {
            var state = try states[part] ?? function.makeState()
            states[part] = nil
            do {
                let outputs = try await function.run(inputs, changing: &state)
                states[part] = state
                return outputs
            } catch {
                states[part] = state
                throw error
            }
        }

        /// New keys and values of every part, where functions put them out.
        private func rows(of outputs: [[String: NDArray]]) throws -> [NDArray] {
            guard !movesRows else { return [] }
            return try outputs.map { arrays in
                guard let rows = arrays["rows"] else {
                    throw SpeculativeError.backEnd("a function puts out no 'rows', though its cache is an input")
                }
                return rows
            }
        }
    }

    /// What a step function put out.
    @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
    struct CoreAIOutputs: StepOutputs {
        let arrays: [String: NDArray]

        func integers(_ name: String) throws -> [Int] { try array(name).readIntegers() }

        func logits(_ name: String, rows: Int?, block: Int) throws -> LogitRows {
            try array(name).readLogits(rows: rows, block: block)
        }

        func hasStreamsOfEveryNode() throws -> Bool { try array("stream_logits").shape.count == 3 }

        private func array(_ name: String) throws -> NDArray {
            guard let array = arrays[name] else {
                throw SpeculativeError.backEnd("the asset's step function has no output '\(name)'")
            }
            return array
        }
    }
#endif
