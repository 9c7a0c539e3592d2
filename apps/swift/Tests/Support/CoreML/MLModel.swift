import Foundation

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

    init(_ feature: ServerFeature) throws {
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

    init(inputs: [ServerFeature], outputs: [ServerFeature]) throws {
        inputDescriptionsByName = try Dictionary(
            uniqueKeysWithValues: inputs.map { ($0.name, try MLFeatureDescription($0)) })
        outputDescriptionsByName = try Dictionary(
            uniqueKeysWithValues: outputs.map { ($0.name, try MLFeatureDescription($0)) })
    }
}

/// A state that lives in the child process.
public final class MLState {
    let server: ExecutorServer
    let number: Int

    init(server: ExecutorServer, number: Int) {
        self.server = server
        self.number = number
    }

    deinit { server.releaseState(number) }
}

/// One function of a package, run by the reference executor in a child process.
public final class MLModel {
    public let modelDescription: MLModelDescription
    private let server: ExecutorServer
    private let function: String

    public init(contentsOf url: URL, configuration: MLModelConfiguration) throws {
        let name = url.appendingPathComponent(CompiledStandIn.fileName)
        guard let package = try? String(contentsOf: name, encoding: .utf8) else {
            throw StandInError("\(url.path): not a compiled model")
        }
        guard let function = configuration.functionName else {
            throw StandInError("a package with several functions needs functionName")
        }
        server = try ExecutorServer.running(package)
        self.function = function
        let (inputs, outputs) = try server.describe(function)
        modelDescription = try MLModelDescription(inputs: inputs, outputs: outputs)
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
        MLState(server: server, number: server.makeState(function))
    }

    public func prediction(
        from input: any MLFeatureProvider, using state: MLState,
        options: MLPredictionOptions = MLPredictionOptions()
    ) throws -> any MLFeatureProvider {
        guard state.server === server else { throw StandInError("\(function): a state of another package") }
        var inputs: [String: MLMultiArray] = [:]
        for (name, description) in modelDescription.inputDescriptionsByName {
            guard let array = input.featureValue(for: name)?.multiArrayValue else {
                throw StandInError("\(function): no input '\(name)'")
            }
            guard array.dataType == description.multiArrayConstraint?.dataType,
                array.shape == description.multiArrayConstraint?.shape
            else { throw StandInError("\(function): input '\(name)' has another type or shape") }
            inputs[name] = array
        }
        let results = try server.predict(function, state.number, inputs)
        var outputs: [String: Any] = [:]
        for (name, (description, data)) in results {
            let array = try options.outputBackings[name] as? MLMultiArray
                ?? MLMultiArray(shape: description.shape.map { NSNumber(value: $0) }, dataType: description.type)
            try array.unpack(data)
            outputs[name] = array
        }
        return try MLDictionaryFeatureProvider(dictionary: outputs)
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
