import SpeculativeStreaming
import SpeculativeStreamingCoreML

#if canImport(CoreML)
    import CoreML
#endif
#if canImport(CoreAI)
    import CoreAI
    import SpeculativeStreamingCoreAI
#endif

/// What Core ML may compute on, and what Core AI prefers.
enum ComputeUnits: String {
    case all, ane, gpu, cpu

    var coreML: MLComputeUnits {
        switch self {
        case .all: return .all
        case .ane: return .cpuAndNeuralEngine
        case .gpu: return .cpuAndGPU
        case .cpu: return .cpuOnly
        }
    }
}

#if canImport(CoreAI)
    @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
    extension ComputeUnits {
        /// Only the CPU can be asked for alone; another unit is preferred, and others may compute as well.
        var coreAI: SpecializationOptions {
            switch self {
            case .all: return .default
            case .ane: return SpecializationOptions(preferredComputeUnitKind: .neuralEngine)
            case .gpu: return SpecializationOptions(preferredComputeUnitKind: .gpu)
            case .cpu: return .cpuOnly
            }
        }
    }
#endif

/// What runs an adapter's functions.
enum BackEnd {
    case coreML(CoreMLOptions, StepFunctions)
    case coreAI(ComputeUnits, StepFunctions)

    /// The one that was asked for, or what the bundle has, Core ML first.
    ///
    /// Throws `noCoreMLPackage` or `noCoreAIAsset`.
    init(_ arguments: Arguments, _ adapter: BundledAdapter) throws {
        let chosen = arguments.backEnd ?? (adapter.coreml == nil && adapter.coreai != nil ? .coreai : .coreml)
        switch chosen {
        case .coreml:
            guard let functions = adapter.coreml else {
                throw SpeculativeError.noCoreMLPackage(adapter: adapter.app)
            }
            let cache = CompiledPackageCache(folder: arguments.cache)
            self = .coreML(CoreMLOptions(computeUnits: arguments.computeUnits.coreML, cache: cache), functions)
        case .coreai:
            guard let functions = adapter.coreai else {
                throw SpeculativeError.noCoreAIAsset(adapter: adapter.app)
            }
            self = .coreAI(arguments.computeUnits, functions)
        }
    }

    var functions: StepFunctions {
        switch self {
        case .coreML(_, let functions), .coreAI(_, let functions): return functions
        }
    }

    func model(_ adapter: BundledAdapter, of bundle: SpeculativeBundle) async throws -> sending any StepModel {
        switch self {
        case .coreML(let options, _): return try await CoreMLStepModel.open(adapter, of: bundle, options: options)
        case .coreAI(let units, _):
            #if canImport(CoreAI)
                if #available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *) {
                    let options = CoreAIOptions(specialization: units.coreAI)
                    return try await CoreAIStepModel.open(adapter, of: bundle, options: options)
                }
            #endif
            throw SpeculativeError.backEnd("Core AI needs macOS 27")
        }
    }
}
