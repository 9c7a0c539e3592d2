import Foundation
import SpeculativeStreaming
import SpeculativeStreamingCoreML
import Testing

/// A tiny random bundle (12 nodes of which 9 are kept, context 96, chunks of 16, bigram bias), which
/// `make test-swift` writes with the answers that the Python step model gives on the same package.
struct TinyBundle {
    struct Answer: Decodable {
        let prompt: [Int]
        let tokens: [Int]
        let calls: Int
        /// Tokens and parents of every call's tree.
        let trees: [[[Int]]]
        let text: String
    }

    let bundle: SpeculativeBundle
    let answers: [Answer]
    let options: CoreMLOptions
    let tokenizer: ByteLevelDecoder

    /// name: `bundle`; `parts-2` or `parts-3`, the same model in so many packages; or `sampling`, whose package
    /// returns its logits.
    init(_ name: String = "bundle") throws {
        let folder = try #require(
            ProcessInfo.processInfo.environment["SS_TINY_BUNDLE"],
            "SS_TINY_BUNDLE names no folder; run these tests through make test-swift")
        let url = URL(fileURLWithPath: folder)
        bundle = try SpeculativeBundle(contentsOf: url.appendingPathComponent(name), verifyingChecksums: true)
        answers = try JSONDecoder().decode(
            [Answer].self, from: Data(contentsOf: url.appendingPathComponent("answers.json")))
        options = CoreMLOptions(cache: CompiledPackageCache(folder: url.appendingPathComponent("compiled")))
        tokenizer = try ByteLevelDecoder(tokenizerFile: bundle.url.appendingPathComponent("tokenizer.json"))
    }
}
