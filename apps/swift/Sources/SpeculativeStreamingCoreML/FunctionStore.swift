#if canImport(CoreML)
    import CoreML
    import Foundation
    import SpeculativeStreaming

    /// How Core ML is to run a package.
    public struct CoreMLOptions: Sendable, Hashable {
        public var computeUnits: MLComputeUnits
        public var cache: CompiledPackageCache
        /// Reuse the memory of large outputs. Off only to look for a fault in a driver.
        public var usesOutputBackings: Bool

        public init(
            computeUnits: MLComputeUnits = .all, cache: CompiledPackageCache = CompiledPackageCache(),
            usesOutputBackings: Bool = true
        ) {
            self.computeUnits = computeUnits
            self.cache = cache
            self.usesOutputBackings = usesOutputBackings
        }
    }

    /// One function of a package, ready to run. Predictions are serialized: Core ML wants one at a time per
    /// model and per state, and generators on different actors may share a function.
    final class LoadedFunction: PartFunction, @unchecked Sendable {
        private let model: MLModel
        private let lock = NSLock()

        init(_ model: MLModel) { self.model = model }

        var description: MLModelDescription { model.modelDescription }

        var inputNames: [String] { Array(description.inputDescriptionsByName.keys) }

        var outputNames: [String] { Array(description.outputDescriptionsByName.keys) }

        func makeState() -> MLState { lock.withLock { model.makeState() } }

        /// Runs the function once; changes `state`. Throws `backEnd` with Core ML's message.
        func predict(
            _ inputs: any MLFeatureProvider, _ state: MLState, _ options: MLPredictionOptions
        ) throws -> any MLFeatureProvider {
            try lock.withLock {
                do {
                    return try model.prediction(from: inputs, using: state, options: options)
                } catch {
                    throw SpeculativeError.backEnd("Core ML's prediction failed: \(oneLine(error))")
                }
            }
        }
    }

    /// Functions that were loaded, so that going back to an adapter costs nothing. Functions of one package map
    /// the same weights file: another adapter adds its functions, not another base.
    public actor FunctionStore {
        public static let shared = FunctionStore()

        private struct Key: Hashable {
            let compiled: URL
            let function: String
            let units: Int
        }

        private var loaded = HeldFunctions<Key, LoadedFunction>()
        private var pressure: (any Sendable)?

        public init() {}

        /// Forgets functions that no generator uses; those in use stay until their generator goes.
        public func releaseIdle() { loaded.releaseIdle() }

        /// The functions of an adapter in all packages of its model, loaded now if they are not yet.
        func functions(
            _ functions: StepFunctions, of bundle: SpeculativeBundle, _ options: CoreMLOptions
        ) async throws -> (prefill: FunctionChain, step: FunctionChain) {
            if pressure == nil {
                pressure = onMemoryPressure { [weak self] in Task { [weak self] in await self?.releaseIdle() } }
            }
            return try await functions.chains { package, name in
                try await load(name, try await options.cache.compiled(package, of: bundle), options)
            }
        }

        private func load(_ name: String, _ compiled: URL, _ options: CoreMLOptions) async throws -> LoadedFunction {
            let key = Key(compiled: compiled, function: name, units: options.computeUnits.rawValue)
            if let found = loaded[key] { return found }
            let fresh = try await Self.open(name, compiled, options.computeUnits)
            loaded[key] = fresh
            return fresh
        }

        private nonisolated static func open(
            _ name: String, _ compiled: URL, _ units: MLComputeUnits
        ) async throws -> LoadedFunction {
            let configuration = MLModelConfiguration()
            configuration.functionName = name
            configuration.computeUnits = units
            do {
                return LoadedFunction(try await MLModel.load(contentsOf: compiled, configuration: configuration))
            } catch {
                throw SpeculativeError.backEnd("Core ML cannot load '\(name)': \(oneLine(error))")
            }
        }
    }
#endif
