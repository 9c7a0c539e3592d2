import Foundation
import SpeculativeStreaming

/// `ss-stream`: answers prompts with a bundle's Core ML package or Core AI asset.
@main
struct StreamCommand {
    static func main() async {
        do {
            try await run(Arguments(Array(CommandLine.arguments.dropFirst())))
        } catch {
            let line = (error as? SpeculativeError)?.description ?? "\(error)"
            FileHandle.standardError.write(Data("error: \(line)\n".utf8))
            exit(error as? SpeculativeError == .cancelled ? 130 : 2)
        }
    }

    private static func run(_ arguments: Arguments) async throws {
        if arguments.help {
            print(Arguments.usage)
            return
        }
        if arguments.mode == .benchHost { return try HostBenchmark(arguments).run() }
        let session = try await Session(arguments)
        switch arguments.mode {
        case .validate: try await session.validate()
        case .bench: try await session.bench()
        default: try await session.generate()
        }
    }
}

/// Prints an encodable value as one line of JSON.
func printJSON(_ value: some Encodable) throws {
    let encoder = JSONEncoder()
    encoder.keyEncodingStrategy = .convertToSnakeCase
    encoder.outputFormatting = [.sortedKeys, .withoutEscapingSlashes]
    print(String(decoding: try encoder.encode(value), as: UTF8.self))
}

/// Writes text to standard output at once, so that it streams through a pipe as well.
func show(_ text: String) {
    FileHandle.standardOutput.write(Data(text.utf8))
}

func note(_ text: String) {
    FileHandle.standardError.write(Data((text + "\n").utf8))
}
