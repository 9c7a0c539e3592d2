#if canImport(CoreAI)
    import CoreAI
    import Foundation
    import SpeculativeStreaming

    /// How Core AI is to run an asset.
    @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
    public struct CoreAIOptions: Sendable, Hashable {
        /// What the asset is specialised for when it is first loaded; the system keeps the result.
        ///
        /// `expectFrequentReshapes` has to stay false: all shapes of these functions are fixed, and with it loading
        /// such functions was reported to end the process.
        public var specialization: SpecializationOptions

        public init(specialization: SpecializationOptions = .default) {
            self.specialization = specialization
        }
    }

    /// Functions that were loaded, so that going back to an adapter costs nothing. They own the weights, which
    /// functions of one asset share.
    @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
    public actor AssetStore {
        public static let shared = AssetStore()

        private struct ModelKey: Hashable {
            let content: String
            let options: CoreAIOptions
        }

        private struct FunctionKey: Hashable {
            let model: ModelKey
            let function: String
        }

        private var models: [ModelKey: AIModel] = [:]
        private var loaded = HeldFunctions<FunctionKey, AssetFunction>()
        private var pressure: (any Sendable)?

        public init() {}

        /// Forgets functions that no generator uses; those in use stay until their generator goes.
        public func releaseIdle() {
            models = [:]
            loaded.releaseIdle()
        }

        /// The functions of an adapter in all assets of its model, loaded now if they are not yet.
        func functions(
            _ functions: StepFunctions, of bundle: SpeculativeBundle, _ options: CoreAIOptions
        ) async throws -> (prefill: FunctionChain, step: FunctionChain) {
            if pressure == nil {
                pressure = onMemoryPressure { [weak self] in Task { [weak self] in await self?.releaseIdle() } }
            }
            return try await functions.chains { asset, name in
                try await load(name, bundle.url.appendingPathComponent(asset), bundle.contentDigest(of: asset), options)
            }
        }

        private func load(
            _ name: String, _ asset: URL, _ content: String, _ options: CoreAIOptions
        ) async throws -> AssetFunction {
            let key = FunctionKey(model: ModelKey(content: content, options: options), function: name)
            if let found = loaded[key] { return found }
            let model = try await model(asset, key.model)
            let function: InferenceFunction?
            do {
                function = try model.loadFunction(named: name)
            } catch {
                throw SpeculativeError.backEnd("\(asset.path): Core AI cannot load '\(name)': \(oneLine(error))")
            }
            guard let function else { throw SpeculativeError.backEnd("\(asset.path): has no function '\(name)'") }
            let fresh = AssetFunction(function)
            loaded[key] = fresh
            return fresh
        }

        private func model(_ asset: URL, _ key: ModelKey) async throws -> AIModel {
            if let found = models[key] { return found }
            do {
                // Core AI was reported not to follow links to an asset.
                let place = asset.resolvingSymlinksInPath()
                let model = try await AIModel(contentsOf: place, options: key.options.specialization)
                models[key] = model
                return model
            } catch {
                throw SpeculativeError.backEnd("\(asset.path): Core AI cannot load it: \(oneLine(error))")
            }
        }
    }
#endif
