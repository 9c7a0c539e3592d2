import Foundation

/// An array as a child process is told of it, or tells of it.
package struct ServedArray: Codable, Sendable {
    package let name: String
    package let dtype: String
    package let shape: [Int]

    package init(name: String, dtype: String, shape: [Int]) {
        self.name = name
        self.dtype = dtype
        self.shape = shape
    }

    var byteCount: Int { shape.reduce(Self.sizes[dtype] ?? 4, *) }

    private static let sizes = ["float64": 8, "float32": 4, "float16": 2, "int32": 4, "int64": 8]
}

/// What a child process is asked.
package struct ServerRequest: Encodable {
    package var op: String
    package var function: String?
    /// Number of a state that lives in the child process.
    package var state: Int?
    /// Which of the arrays are states that come back changed.
    package var states: [String]?
    fileprivate var arrays: [ServedArray] = []

    package init(_ op: String, function: String? = nil, state: Int? = nil, states: [String]? = nil) {
        self.op = op
        self.function = function
        self.state = state
        self.states = states
    }
}

package struct ServerReply: Decodable {
    fileprivate var error: String?
    package var state: Int?
    package var functions: [String]?
    package var inputs: [ServedArray]?
    package var states: [ServedArray]?
    package var outputs: [ServedArray]?
    fileprivate var arrays: [ServedArray]?
}

/// The child process of one package or asset. Messages in both directions: 4 bytes little-endian length of a JSON
/// header, the header, then the bytes of its arrays in order (`model_server.py`).
package final class ModelServer: @unchecked Sendable {
    private let process = Process()
    private let toChild = Pipe()
    private let fromChild = Pipe()
    private let lock = NSLock()

    private static let registry = NSLock()
    nonisolated(unsafe) private static var running: [String: ModelServer] = [:]

    /// The process of a package or an asset, started at the first call.
    package static func running(_ path: String) throws -> ModelServer {
        try registry.withLock {
            if let found = running[path] { return found }
            let server = try ModelServer(path)
            running[path] = server
            return server
        }
    }

    private init(_ path: String) throws {
        let environment = ProcessInfo.processInfo.environment
        let python = (environment["SS_PYTHON"] ?? "python3").split(separator: " ").map(String.init)
        let repository = environment["SS_REPOSITORY"].map { URL(fileURLWithPath: $0) } ?? Self.repository
        let script = repository.appendingPathComponent("apps/swift/Tests/Support/model_server.py").path
        process.executableURL = URL(fileURLWithPath: "/usr/bin/env")
        process.arguments = python + [script, repository.path, path]
        process.standardInput = toChild
        process.standardOutput = fromChild
        try process.run()
        _ = try exchange(ServerRequest("hello"))
    }

    /// The repository that this file was compiled in.
    private static var repository: URL {
        (0..<6).reduce(URL(fileURLWithPath: #filePath)) { url, _ in url.deletingLastPathComponent() }
    }

    /// Sends a request with its arrays, row-major without padding, and waits for the reply.
    package func exchange(
        _ request: ServerRequest, _ arrays: [(ServedArray, Data)] = []
    ) throws -> (reply: ServerReply, arrays: [(ServedArray, Data)]) {
        var request = request
        request.arrays = arrays.map(\.0)
        let header = try JSONEncoder().encode(request)
        return try lock.withLock {
            var length = UInt32(header.count).littleEndian
            let message = arrays.reduce(Data(bytes: &length, count: 4) + header) { $0 + $1.1 }
            try toChild.fileHandleForWriting.write(contentsOf: message)
            let replyLength = try read(4).withUnsafeBytes { UInt32(littleEndian: $0.loadUnaligned(as: UInt32.self)) }
            let reply = try JSONDecoder().decode(ServerReply.self, from: read(Int(replyLength)))
            if let error = reply.error { throw StandInError(error) }
            return (reply, try (reply.arrays ?? []).map { ($0, try read($0.byteCount)) })
        }
    }

    private func read(_ count: Int) throws -> Data {
        var data = Data()
        while data.count < count {
            guard let piece = try fromChild.fileHandleForReading.read(upToCount: count - data.count), !piece.isEmpty
            else { throw StandInError("the model's process ended (its message is above)") }
            data.append(piece)
        }
        return data
    }
}

/// What went wrong in a stand-in, in the place of Apple's own errors.
package struct StandInError: LocalizedError, CustomStringConvertible {
    package let description: String

    package init(_ description: String) { self.description = description }

    package var errorDescription: String? { description }
}
