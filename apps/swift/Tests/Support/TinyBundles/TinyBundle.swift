import Foundation
import SpeculativeStreaming

/// A tiny random bundle (12 nodes of which 9 are kept, context 96, chunks of 16, bigram bias), which
/// `make test-swift` writes with the answers that the Python step model gives on the same package or asset.
package struct TinyBundle {
    package struct Answer: Decodable, Sendable {
        package let question: String
        package let prompt: [Int]
        package let tokens: [Int]
        package let calls: Int
        /// Tokens and parents of every call's tree.
        package let trees: [[[Int]]]
        package let text: String

        /// Generated tokens but the first per call.
        package var tokensPerCall: Double { Double(tokens.count - 1) / Double(calls) }
    }

    /// What the Python step model draws from a package or an asset that returns its logits.
    package struct SampledAnswers: Decodable, Sendable {
        package struct Run: Decodable, Sendable {
            package let seed: UInt64
            package let tokens: [Int]
            package let calls: Int
        }

        package let prompt: [Int]
        package let runs: [Run]
        /// One step's tree, the nodes that it keeps and the largest logit of each of their streams [K][γ].
        package let tokens: [Int]
        package let parents: [Int]
        package let kept: [Int]
        package let largest: [[Float]]
    }

    package let bundle: SpeculativeBundle
    package let tokenizer: ByteLevelDecoder

    /// The folder of all tiny bundles.
    package static func folder() throws -> URL {
        guard let folder = ProcessInfo.processInfo.environment["SS_TINY_BUNDLE"] else {
            throw SpeculativeError.invalidSetting(
                "SS_TINY_BUNDLE names no folder; run these tests through make test-swift")
        }
        return URL(fileURLWithPath: folder)
    }

    /// Whether assets could be made where the bundles were (`coreai-core` is for few systems).
    package static var hasAssets: Bool {
        guard let folder = try? folder() else { return true }
        return FileManager.default.fileExists(atPath: folder.appendingPathComponent("coreai").path)
    }

    /// name: `bundle`; `parts-2` or `parts-3`, the same model in so many packages; `sampling`, whose package returns
    /// its logits; or one of those with assets (`tests/swift/tiny_bundle.py`).
    package init(_ name: String = "bundle") throws {
        bundle = try SpeculativeBundle(
            contentsOf: Self.folder().appendingPathComponent(name), verifyingChecksums: true)
        tokenizer = try ByteLevelDecoder(tokenizerFile: bundle.url.appendingPathComponent("tokenizer.json"))
    }

    /// Answers on packages.
    package static func answers() throws -> [Answer] { try read("answers.json") }

    /// Answers of an adapter on assets.
    package static func assetAnswers(of app: String = "tiny") throws -> [Answer] {
        let all: [String: [Answer]] = try read("coreai-answers.json")
        return all[app] ?? []
    }

    /// name: `sampled` or `coreai-sampled`.
    package static func sampled(_ name: String) throws -> SampledAnswers { try read(name + ".json") }

    private static func read<Value: Decodable>(_ name: String) throws -> Value {
        try JSONDecoder().decode(Value.self, from: Data(contentsOf: folder().appendingPathComponent(name)))
    }

    /// A changed copy of the bundle's folder.
    package func changed(_ change: (_ copy: URL) throws -> Void) throws -> TemporaryCopy {
        let copy = try TemporaryCopy(of: bundle.url)
        try change(copy.url)
        return copy
    }
}

/// A copy of a folder, removed with the value. It lies beside the folder, where the stand-ins' processes see it.
package final class TemporaryCopy {
    package let url: URL

    init(of folder: URL) throws {
        url = folder.deletingLastPathComponent().appendingPathComponent(UUID().uuidString)
        try FileManager.default.copyItem(at: folder, to: url)
    }

    deinit { try? FileManager.default.removeItem(at: url) }
}
