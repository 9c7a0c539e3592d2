#if canImport(CoreAI)
    import CoreAI
    import SpeculativeStreaming

    @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
    extension SpeculativeGenerator {
        /// A generator on a bundle's Core AI asset.
        ///
        /// - Parameters:
        ///   - adapter: nil for the bundle's only one.
        ///   - drafter: nil for best-first trees of the adapter's size.
        public init(
            coreAI bundle: SpeculativeBundle, adapter name: String? = nil, tokenizer: any TextTokenizer,
            drafter: Drafter? = nil, options: CoreAIOptions = CoreAIOptions()
        ) async throws {
            let adapter = try bundle.adapter(name)
            let drafter = try drafter ?? bundle.drafter(for: adapter)
            let model = try await CoreAIStepModel.open(adapter, of: bundle, options: options)
            self.init(model: model, bundle: bundle, adapter: adapter, drafter: drafter, tokenizer: tokenizer)
        }

        /// Goes on with another adapter of the same bundle. What both share stays loaded; functions that were
        /// loaded before are used again.
        public func select(
            adapter name: String, of bundle: SpeculativeBundle, options: CoreAIOptions = CoreAIOptions()
        ) async throws {
            let adapter = try bundle.adapter(name)
            let drafter = try bundle.drafter(for: adapter)
            let model = try await CoreAIStepModel.open(adapter, of: bundle, options: options)
            await replace(model: model, adapter: adapter, drafter: drafter)
        }
    }
#endif
