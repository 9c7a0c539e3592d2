import Foundation
import ModelServer

public enum MLComputeUnits: Int, Sendable {
    case cpuOnly, cpuAndGPU, all, cpuAndNeuralEngine
}

public final class MLModelConfiguration {
    public var computeUnits = MLComputeUnits.all
    public var functionName: String?

    public init() {}
}

public final class MLPredictionOptions {
    public var outputBackings: [String: Any] = [:]

    public init() {}
}

public final class MLMultiArrayConstraint {
    public let shape: [NSNumber]
    public let dataType: MLMultiArrayDataType

    init(shape: [NSNumber], dataType: MLMultiArrayDataType) {
        self.shape = shape
        self.dataType = dataType
    }
}

public final class MLFeatureDescription {
    public let name: String
    public let multiArrayConstraint: MLMultiArrayConstraint?

    init(_ feature: ServedArray) throws {
        guard let type = MLMultiArrayDataType(name: feature.dtype) else {
            throw StandInError("feature '\(feature.name)' has type \(feature.dtype)")
        }
        name = feature.name
        multiArrayConstraint = MLMultiArrayConstraint(
            shape: feature.shape.map { NSNumber(value: $0) }, dataType: type)
    }
}

public final class MLModelDescription {
    public let inputDescriptionsByName: [String: MLFeatureDescription]
    public let outputDescriptionsByName: [String: MLFeatureDescription]

    init(inputs: [ServedArray], outputs: [ServedArray]) throws {
        inputDescriptionsByName = try Dictionary(
            uniqueKeysWithValues: inputs.map { ($0.name, try MLFeatureDescription($0)) })
        outputDescriptionsByName = try Dictionary(
            uniqueKeysWithValues: outputs.map { ($0.name, try MLFeatureDescription($0)) })
    }
}

/// A state that lives in the child process.
public final class MLState {
    let server: ModelServer
    let number: Int

    init(server: ModelServer, number: Int) {
        self.server = server
        self.number = number
    }

    deinit { _ = try? server.exchange(ServerRequest("release_state", state: number)) }
}

/// One function of a package, run by the reference executor in a child process.
public final class MLModel {
    public let modelDescription: MLModelDescription
    private let server: ModelServer
    private let function: String

    public init(contentsOf url: URL, configuration: MLModelConfiguration) throws {
        let name = url.appendingPathComponent(CompiledStandIn.fileName)
        guard let package = try? String(contentsOf: name, encoding: .utf8) else {
            throw StandInError("\(url.path): not a compiled model")
        }
        guard let function = configuration.functionName else {
            throw StandInError("a package with several functions needs functionName")
        }
        server = try ModelServer.running(package)
        self.function = function
        let described = try server.exchange(ServerRequest("describe", function: function)).reply
        modelDescription = try MLModelDescription(inputs: described.inputs ?? [], outputs: described.outputs ?? [])
    }

    public class func load(
        contentsOf url: URL, configuration: MLModelConfiguration
    ) async throws -> MLModel {
        try MLModel(contentsOf: url, configuration: configuration)
    }

    /// Stands for Core ML's compiler: the "compiled" folder names the package.
    public class func compileModel(at url: URL) async throws -> URL {
        guard FileManager.default.fileExists(atPath: url.appendingPathComponent("Manifest.json").path) else {
            throw StandInError("\(url.path): not a package")
        }
        let folder = FileManager.default.temporaryDirectory
            .appendingPathComponent(UUID().uuidString + ".mlmodelc")
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        try url.path.write(
            to: folder.appendingPathComponent(CompiledStandIn.fileName), atomically: true, encoding: .utf8)
        return folder
    }

    public func makeState() -> MLState {
        // Core ML's makeState cannot fail; neither does this, short of a dead child process.
        let made = try? server.exchange(ServerRequest("make_state", function: function))
        return MLState(server: server, number: made?.reply.state ?? -1)
    }

    public func prediction(
        from input: any MLFeatureProvider, using state: MLState,
        options: MLPredictionOptions = MLPredictionOptions()
    ) throws -> any MLFeatureProvider {
        guard state.server === server else { throw StandInError("\(function): a state of another package") }
        let request = ServerRequest("predict", function: function, state: state.number)
        var outputs: [String: Any] = [:]
        for (described, data) in try server.exchange(request, try arrays(of: input)).arrays {
            guard let type = MLMultiArrayDataType(name: described.dtype) else {
                throw StandInError("output '\(described.name)' has type \(described.dtype)")
            }
            let array = try options.outputBackings[described.name] as? MLMultiArray
                ?? MLMultiArray(shape: described.shape.map { NSNumber(value: $0) }, dataType: type)
            try array.unpack(data)
            outputs[described.name] = array
        }
        return try MLDictionaryFeatureProvider(dictionary: outputs)
    }
}

extension MLModel {
    /// The inputs, which must be those of the description.
    private func arrays(of input: any MLFeatureProvider) throws -> [(ServedArray, Data)] {
        try modelDescription.inputDescriptionsByName.map { name, description in
            guard let array = input.featureValue(for: name)?.multiArrayValue else {
                throw StandInError("\(function): no input '\(name)'")
            }
            guard array.dataType == description.multiArrayConstraint?.dataType,
                array.shape == description.multiArrayConstraint?.shape
            else { throw StandInError("\(function): input '\(name)' has another type or shape") }
            let shape = array.shape.map(\.intValue)
            return (ServedArray(name: name, dtype: array.dataType.name, shape: shape), array.packed)
        }
    }
}

enum CompiledStandIn {
    static let fileName = "package.txt"
}

// MARK: - Compute plans: declared, so that code using them is checked; there is no device to ask.

public enum MLComputeDevice: Sendable {
    case cpu(MLCPUComputeDevice)
    case gpu(MLGPUComputeDevice)
    case neuralEngine(MLNeuralEngineComputeDevice)
}

public final class MLCPUComputeDevice: Sendable {}
public final class MLGPUComputeDevice: Sendable {}
public final class MLNeuralEngineComputeDevice: Sendable {}

public enum MLModelStructure: Sendable {
    case program(Program)
    case unsupported

    public struct Program: Sendable {
        public let functions: [String: Function]

        public struct Function: Sendable { public let block: Block }
        public struct Block: Sendable { public let operations: [Operation] }
        public struct Operation: Sendable { public let operatorName: String }
    }
}

public final class MLComputePlan: Sendable {
    public struct DeviceUsage: Sendable {
        public let supported: [MLComputeDevice]
        public let preferred: MLComputeDevice
    }

    public struct Cost: Sendable { public let weight: Double }

    public let modelStructure = MLModelStructure.unsupported

    private init() {}

    public static func load(
        contentsOf url: URL, configuration: MLModelConfiguration
    ) async throws -> MLComputePlan {
        throw StandInError("compute plans exist on Apple platforms only")
    }

    public func deviceUsage(for operation: MLModelStructure.Program.Operation) -> DeviceUsage? { nil }

    public func estimatedCost(of operation: MLModelStructure.Program.Operation) -> Cost? { nil }
}
