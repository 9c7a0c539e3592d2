import Foundation

/// An input or output as the child process describes it.
struct ServerFeature: Codable {
    let name: String
    let dtype: String
    let shape: [Int]
}

/// The child process of one package. Messages in both directions: 4 bytes little-endian length of a JSON header,
/// the header, then the bytes of its arrays in order.
final class ExecutorServer: @unchecked Sendable {
    private struct Request: Encodable {
        var op: String
        var function: String?
        var state: Int?
        var arrays: [ServerFeature] = []
    }

    private struct Reply: Decodable {
        var error: String?
        var state: Int?
        var inputs: [ServerFeature]?
        var outputs: [ServerFeature]?
        var arrays: [ServerFeature]?
    }

    private let process = Process()
    private let toChild = Pipe()
    private let fromChild = Pipe()
    private let lock = NSLock()

    private static let registry = NSLock()
    nonisolated(unsafe) private static var running: [String: ExecutorServer] = [:]

    /// The process of a package, started at the first call.
    static func running(_ package: String) throws -> ExecutorServer {
        try registry.withLock {
            if let found = running[package] { return found }
            let server = try ExecutorServer(package)
            running[package] = server
            return server
        }
    }

    private init(_ package: String) throws {
        let environment = ProcessInfo.processInfo.environment
        let python = (environment["SS_PYTHON"] ?? "python3").split(separator: " ").map(String.init)
        let repository = environment["SS_REPOSITORY"].map { URL(fileURLWithPath: $0) } ?? Self.repository
        let script = repository.appendingPathComponent("apps/swift/Tests/Support/executor_server.py").path
        process.executableURL = URL(fileURLWithPath: "/usr/bin/env")
        process.arguments = python + [script, repository.path, package]
        process.standardInput = toChild
        process.standardOutput = fromChild
        try process.run()
        _ = try exchange(Request(op: "hello"))
    }

    /// The repository that this file was compiled in.
    private static var repository: URL {
        (0..<6).reduce(URL(fileURLWithPath: #filePath)) { url, _ in url.deletingLastPathComponent() }
    }

    func describe(_ function: String) throws -> (inputs: [ServerFeature], outputs: [ServerFeature]) {
        let reply = try exchange(Request(op: "describe", function: function)).0
        return (reply.inputs ?? [], reply.outputs ?? [])
    }

    func makeState(_ function: String) -> Int {
        // Core ML's makeState cannot fail; neither does this, short of a dead child process.
        (try? exchange(Request(op: "make_state", function: function)).0.state) ?? -1
    }

    func releaseState(_ state: Int) {
        _ = try? exchange(Request(op: "release_state", state: state))
    }

    func predict(
        _ function: String, _ state: Int, _ inputs: [String: MLMultiArray]
    ) throws -> [String: (description: (shape: [Int], type: MLMultiArrayDataType), data: Data)] {
        var request = Request(op: "predict", function: function, state: state)
        var payload = Data()
        for (name, array) in inputs.sorted(by: { $0.key < $1.key }) {
            request.arrays.append(
                ServerFeature(name: name, dtype: array.dataType.name, shape: array.shape.map(\.intValue)))
            payload.append(array.packed)
        }
        let (reply, data) = try exchange(request, payload)
        var results: [String: (description: (shape: [Int], type: MLMultiArrayDataType), data: Data)] = [:]
        for (array, piece) in zip(reply.arrays ?? [], data) {
            guard let type = MLMultiArrayDataType(name: array.dtype) else {
                throw StandInError("output '\(array.name)' has type \(array.dtype)")
            }
            results[array.name] = ((array.shape, type), piece)
        }
        return results
    }

    private func exchange(_ request: Request, _ payload: Data = Data()) throws -> (Reply, [Data]) {
        try lock.withLock {
            let header = try JSONEncoder().encode(request)
            var length = UInt32(header.count).littleEndian
            try toChild.fileHandleForWriting.write(contentsOf: Data(bytes: &length, count: 4) + header + payload)
            let replyLength = try read(4).withUnsafeBytes { UInt32(littleEndian: $0.loadUnaligned(as: UInt32.self)) }
            let reply = try JSONDecoder().decode(Reply.self, from: read(Int(replyLength)))
            if let error = reply.error { throw StandInError(error) }
            let pieces = try (reply.arrays ?? []).map { array in
                let size = MLMultiArrayDataType(name: array.dtype)?.size ?? 4
                return try read(array.shape.reduce(size, *))
            }
            return (reply, pieces)
        }
    }

    private func read(_ count: Int) throws -> Data {
        var data = Data()
        while data.count < count {
            guard let piece = try fromChild.fileHandleForReading.read(upToCount: count - data.count), !piece.isEmpty
            else { throw StandInError("the executor's process ended (its message is above)") }
            data.append(piece)
        }
        return data
    }
}
