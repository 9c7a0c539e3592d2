import Foundation
import ModelServer

public enum ComputeUnitKind: Hashable, Sendable {
    case cpu, gpu, neuralEngine
}

public struct SpecializationOptions: Hashable, Sendable {
    public static let `default` = SpecializationOptions(nil, [.cpu, .gpu, .neuralEngine])
    public static let cpuOnly = SpecializationOptions(nil, [.cpu])

    public private(set) var allowedComputeUnitKinds: Set<ComputeUnitKind>
    public private(set) var preferredComputeUnitKind: ComputeUnitKind?
    public var expectFrequentReshapes = false

    public init(preferredComputeUnitKind: ComputeUnitKind) {
        self.init(preferredComputeUnitKind, [.cpu, .gpu, .neuralEngine])
    }

    private init(_ preferred: ComputeUnitKind?, _ allowed: Set<ComputeUnitKind>) {
        allowedComputeUnitKinds = allowed
        preferredComputeUnitKind = preferred
    }
}

/// An asset, run by Apple's own runtime for Python in a child process.
public struct AIModel: Sendable {
    public let functionNames: [String]
    private let server: ModelServer

    public init(contentsOf modelURL: URL, options: SpecializationOptions = .default) async throws {
        guard FileManager.default.fileExists(atPath: modelURL.path) else {
            throw StandInError("\(modelURL.path): no such asset")
        }
        server = try ModelServer.running(modelURL.path)
        functionNames = try server.exchange(ServerRequest("functions")).reply.functions ?? []
    }

    public func loadFunction(named functionName: String) throws -> InferenceFunction? {
        guard functionNames.contains(functionName) else { return nil }
        return try InferenceFunction(named: functionName, on: server)
    }
}

public struct InferenceFunctionDescriptor: Sendable {
    public let name: String
    public let inputNames: [String]
    public let stateNames: [String]
    public let outputNames: [String]
    private let inputs: [String: NDArrayDescriptor]
    private let states: [String: NDArrayDescriptor]
    private let outputs: [String: NDArrayDescriptor]

    init(_ name: String, _ described: ServerReply) throws {
        func named(_ arrays: [ServedArray]?) throws -> [String: NDArrayDescriptor] {
            try Dictionary(uniqueKeysWithValues: (arrays ?? []).map { ($0.name, try NDArrayDescriptor($0)) })
        }
        self.name = name
        inputNames = (described.inputs ?? []).map(\.name)
        stateNames = (described.states ?? []).map(\.name)
        outputNames = (described.outputs ?? []).map(\.name)
        inputs = try named(described.inputs)
        states = try named(described.states)
        outputs = try named(described.outputs)
    }

    public func inputDescriptor(of inputName: String) -> InferenceValue.Descriptor? {
        inputs[inputName].map(InferenceValue.Descriptor.ndArray)
    }

    public func stateDescriptor(of stateName: String) -> InferenceValue.Descriptor? {
        states[stateName].map(InferenceValue.Descriptor.ndArray)
    }

    public func outputDescriptor(of outputName: String) -> InferenceValue.Descriptor? {
        outputs[outputName].map(InferenceValue.Descriptor.ndArray)
    }
}

/// One function of an asset. States live in the caller's arrays: they go to the child process with every call and
/// their memory is written when it answers.
public struct InferenceFunction: Sendable {
    public let descriptor: InferenceFunctionDescriptor
    private let server: ModelServer

    init(named name: String, on server: ModelServer) throws {
        self.server = server
        descriptor = try InferenceFunctionDescriptor(
            name, server.exchange(ServerRequest("describe", function: name)).reply)
    }

    public struct MutableViews: ~Copyable {
        fileprivate var memory: [String: NDArray.Memory] = [:]

        public init() {}

        public mutating func insert(
            _ value: inout some InferenceValue.MutableViewRepresentable & ~Copyable, for name: String
        ) {
            memory[name] = value.mutableView().memory
        }

        fileprivate consuming func take() -> [String: NDArray.Memory] { memory }
    }

    public struct Outputs: ~Copyable {
        fileprivate var arrays: [String: NDArray]

        public var count: Int { arrays.count }
        public var names: some Collection<String> { arrays.keys }

        public mutating func remove(_ outputName: String) -> InferenceValue? {
            arrays.removeValue(forKey: outputName).map { InferenceValue(array: $0) }
        }
    }

    public func run(
        inputs: [String: NDArray], states: consuming MutableViews = MutableViews(),
        outputViews: consuming MutableViews = MutableViews()
    ) async throws -> Outputs {
        let (given, targets) = (states.take(), outputViews.take())
        return Outputs(arrays: try call(inputs, given, targets))
    }

    /// Has the child process run the function. targets: memory for outputs that are not to be returned.
    private func call(
        _ inputs: [String: NDArray], _ given: [String: NDArray.Memory], _ targets: [String: NDArray.Memory]
    ) throws -> [String: NDArray] {
        guard Set(given.keys) == Set(descriptor.stateNames) else {
            throw StandInError(
                "\(descriptor.name): the states are \(descriptor.stateNames), not \(given.keys.sorted())")
        }
        let arrays = try descriptor.inputNames.map { name in
            guard let array = inputs[name] else { throw StandInError("\(descriptor.name): no input '\(name)'") }
            return try served(name, array.memory, descriptor.inputDescriptor(of: name))
        } + descriptor.stateNames.map { try served($0, given[$0], descriptor.stateDescriptor(of: $0)) }
        let request = ServerRequest("run", function: descriptor.name, states: descriptor.stateNames)
        var outputs: [String: NDArray] = [:]
        for (described, data) in try server.exchange(request, arrays).arrays {
            if let memory = given[described.name] ?? targets[described.name] {
                try memory.unpack(data)
                continue
            }
            let array = NDArray(shape: described.shape, scalarType: try NDArray.ScalarType(served: described))
            try array.memory.unpack(data)
            outputs[described.name] = array
        }
        return outputs
    }

    private func served(
        _ name: String, _ memory: NDArray.Memory?, _ descriptor: InferenceValue.Descriptor?
    ) throws -> (ServedArray, Data) {
        guard let memory, case .ndArray(let expected)? = descriptor, memory.scalarType == expected.scalarType,
            memory.shape == expected.shape
        else { throw StandInError("\(self.descriptor.name): '\(name)' has another type or shape") }
        return (ServedArray(name: name, dtype: memory.scalarType.name, shape: memory.shape), memory.packed)
    }
}
