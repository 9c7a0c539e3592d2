#if canImport(FoundationModels) && (compiler(>=6.4) || os(Linux))
    import SpeculativeStreaming

    #if canImport(CoreAI)
        import SpeculativeStreamingCoreAI
    #endif
    #if canImport(CoreML)
        import SpeculativeStreamingCoreML
    #endif

    /// What runs a bundle's functions, and how.
    @available(macOS 27.0, iOS 27.0, watchOS 27.0, visionOS 27.0, *)
    @available(tvOS, unavailable)
    public struct SpeculativeBackEnd: Hashable, Sendable {
        private enum Engine: Hashable, Sendable {
            #if canImport(CoreAI)
                case coreAI(CoreAIOptions)
            #endif
            #if canImport(CoreML)
                case coreML(CoreMLOptions)
            #endif
        }

        private let engine: Engine

        #if canImport(CoreAI)
            public static func coreAI(_ options: CoreAIOptions = CoreAIOptions()) -> SpeculativeBackEnd {
                SpeculativeBackEnd(engine: .coreAI(options))
            }
        #endif
        #if canImport(CoreML)
            public static func coreML(_ options: CoreMLOptions = CoreMLOptions()) -> SpeculativeBackEnd {
                SpeculativeBackEnd(engine: .coreML(options))
            }
        #endif

        /// The adapter's functions for this back end, nil without any.
        func functions(of adapter: BundledAdapter) -> StepFunctions? {
            switch engine {
            #if canImport(CoreAI)
                case .coreAI: return adapter.coreai
            #endif
            #if canImport(CoreML)
                case .coreML: return adapter.coreml
            #endif
            }
        }

        /// Throws the error that says that the bundle has nothing for this back end.
        func check(_ adapter: BundledAdapter) throws {
            guard functions(of: adapter) == nil else { return }
            switch engine {
            #if canImport(CoreAI)
                case .coreAI: throw SpeculativeError.noCoreAIAsset(adapter: adapter.app)
            #endif
            #if canImport(CoreML)
                case .coreML: throw SpeculativeError.noCoreMLPackage(adapter: adapter.app)
            #endif
            }
        }

        func open(
            _ bundle: SpeculativeBundle, adapter: String, tokenizer: any TextTokenizer
        ) async throws -> SpeculativeGenerator {
            switch engine {
            #if canImport(CoreAI)
                case .coreAI(let options):
                    return try await SpeculativeGenerator(
                        coreAI: bundle, adapter: adapter, tokenizer: tokenizer, options: options)
            #endif
            #if canImport(CoreML)
                case .coreML(let options):
                    return try await SpeculativeGenerator(
                        coreML: bundle, adapter: adapter, tokenizer: tokenizer, options: options)
            #endif
            }
        }
    }
#endif
