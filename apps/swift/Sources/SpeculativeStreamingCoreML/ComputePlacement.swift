#if canImport(CoreML)
    import CoreML
    import Foundation
    import SpeculativeStreaming

    /// Where Core ML plans to run a function: operations and estimated share of the work per device.
    public struct ComputePlacement: Sendable, Codable {
        public struct Share: Sendable, Codable {
            public var operations = 0
            /// Between 0 and 1, as `MLComputePlan` estimates.
            public var cost = 0.0
        }

        /// Path of the package inside the bundle.
        public let package: String
        public let function: String
        /// By device: `CPU`, `GPU`, `Neural Engine`.
        public let devices: [String: Share]

        /// Asks Core ML for the plan of a package's function. Throws `backEnd` where there is none.
        public static func plan(
            _ function: String, in package: String, of bundle: SpeculativeBundle, options: CoreMLOptions
        ) async throws -> ComputePlacement {
            let compiled = try await options.cache.compiled(package, of: bundle)
            let configuration = MLModelConfiguration()
            configuration.functionName = function
            configuration.computeUnits = options.computeUnits
            let plan: MLComputePlan
            do {
                plan = try await MLComputePlan.load(contentsOf: compiled, configuration: configuration)
            } catch {
                throw SpeculativeError.backEnd("no compute plan: \(oneLine(error))")
            }
            guard case .program(let program) = plan.modelStructure, let found = program.functions[function] else {
                throw SpeculativeError.backEnd("no compute plan: the package has no function '\(function)'")
            }
            var devices: [String: Share] = [:]
            for operation in found.block.operations {
                guard let usage = plan.deviceUsage(for: operation) else { continue }
                devices[name(usage.preferred), default: Share()].operations += 1
                devices[name(usage.preferred), default: Share()].cost += plan.estimatedCost(of: operation)?.weight ?? 0
            }
            return ComputePlacement(package: package, function: function, devices: devices)
        }

        private static func name(_ device: MLComputeDevice) -> String {
            if case .neuralEngine = device { return "Neural Engine" }
            if case .gpu = device { return "GPU" }
            return "CPU"
        }
    }
#endif
