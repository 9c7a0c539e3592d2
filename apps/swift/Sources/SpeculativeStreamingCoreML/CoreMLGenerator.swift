#if canImport(CoreML)
    import CoreML
    import SpeculativeStreaming

    extension SpeculativeGenerator {
        /// A generator on a bundle's Core ML package.
        ///
        /// - Parameters:
        ///   - adapter: nil for the bundle's only one.
        ///   - drafter: nil for best-first trees of the adapter's size.
        public init(
            coreML bundle: SpeculativeBundle, adapter name: String? = nil, tokenizer: any TextTokenizer,
            drafter: Drafter? = nil, options: CoreMLOptions = CoreMLOptions()
        ) async throws {
            let adapter = try bundle.adapter(name)
            let drafter = try drafter ?? bundle.drafter(for: adapter)
            let model = try await CoreMLStepModel.open(adapter, of: bundle, options: options)
            self.init(model: model, bundle: bundle, adapter: adapter, drafter: drafter, tokenizer: tokenizer)
        }

        /// Goes on with another adapter of the same bundle. What both share stays loaded; functions that were
        /// loaded before are used again.
        public func select(
            adapter name: String, of bundle: SpeculativeBundle, options: CoreMLOptions = CoreMLOptions()
        ) async throws {
            let adapter = try bundle.adapter(name)
            let drafter = try bundle.drafter(for: adapter)
            let model = try await CoreMLStepModel.open(adapter, of: bundle, options: options)
            await replace(model: model, adapter: adapter, drafter: drafter)
        }
    }
#endif
