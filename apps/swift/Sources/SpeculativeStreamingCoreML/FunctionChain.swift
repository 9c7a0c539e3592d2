#if canImport(CoreML)
    import CoreML
    import SpeculativeStreaming

    /// A function in all the packages that a model is divided into.
    typealias FunctionChain = PartChain<LoadedFunction>

    extension FunctionChain {
        /// A fresh state of every package.
        func makeStates() -> [MLState] { links.map { $0.function.makeState() } }
    }

    /// A chain as one sequence calls it: its inputs, and memory for what is passed on and read at the end.
    final class ChainedCall {
        private let links: [FunctionChain.Link]
        private let inputs: any MLFeatureProvider
        private let options: [MLPredictionOptions]

        /// - Parameters:
        ///   - inputs: of the whole function; their memory is read at every call.
        ///   - reading: fp16 outputs of the last link that are worth memory of their own.
        ///   - usesOutputBackings: whether large outputs go to memory that every call reuses.
        /// - Throws: `backEnd` naming an input that nothing feeds.
        init(
            _ chain: FunctionChain, inputs: any MLFeatureProvider, reading: Set<String> = [],
            usesOutputBackings: Bool
        ) throws {
            links = chain.links
            self.inputs = inputs
            try chain.check(inputs: inputs.featureNames)
            var options: [MLPredictionOptions] = []
            for (part, link) in chain.links.enumerated() {
                let following = part + 1 < links.count ? Set(links[part + 1].feeds?.values.map(\.self) ?? []) : reading
                options.append(
                    usesOutputBackings ? try Self.backings(of: link.function, for: following) : MLPredictionOptions())
            }
            self.options = options
        }

        /// Runs the links one after another, changing their states, and returns the last one's outputs.
        func predict(_ states: [MLState]) throws -> any MLFeatureProvider {
            var passed: (any MLFeatureProvider)?
            for (part, link) in links.enumerated() {
                let own = try link.feeds.map { try features($0, from: passed) } ?? inputs
                passed = try link.function.predict(own, states[part], options[part])
            }
            return passed ?? inputs
        }

        /// What the link before put out goes before an input of the whole function of the same name.
        private func features(
            _ feeds: [String: String], from passed: (any MLFeatureProvider)?
        ) throws -> any MLFeatureProvider {
            try MLDictionaryFeatureProvider(
                dictionary: feeds.compactMapValues { source in
                    passed?.featureValue(for: source) ?? inputs.featureValue(for: source)
                })
        }

        /// Memory for those fp16 outputs of `function` that are named.
        private static func backings(
            of function: LoadedFunction, for names: Set<String>
        ) throws -> MLPredictionOptions {
            let options = MLPredictionOptions()
            for (name, output) in function.description.outputDescriptionsByName where names.contains(name) {
                guard let array = output.multiArrayConstraint, array.dataType == .float16, !array.shape.isEmpty else {
                    continue
                }
                options.outputBackings[name] = try MLMultiArray.halfOutput(array.shape.map(\.intValue))
            }
            return options
        }
    }
#endif
