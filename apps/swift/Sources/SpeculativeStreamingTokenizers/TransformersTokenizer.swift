#if canImport(Tokenizers)
    import Foundation
    import SpeculativeStreaming
    import Tokenizers

    /// A bundle's tokenizer through swift-transformers (its `Tokenizers` only: its language model class makes one
    /// token per call).
    public struct TransformersTokenizer: TextTokenizer {
        private let tokenizer: any Tokenizers.Tokenizer

        /// Reads `tokenizer.json` and `tokenizer_config.json` of the bundle. Throws `damagedFile` when it cannot.
        public init(bundle: SpeculativeBundle) async throws {
            do {
                tokenizer = try await AutoTokenizer.from(modelFolder: bundle.url)
            } catch {
                throw SpeculativeError.damagedFile(
                    path: bundle.url.appendingPathComponent("tokenizer.json").path,
                    reason: "swift-transformers cannot read it: \(error.localizedDescription)")
            }
        }

        public func encode(_ text: String) throws -> [Int] {
            tokenizer.encode(text: text, addSpecialTokens: false)
        }

        public func encode(chat messages: [ChatMessage]) throws -> [Int] {
            guard tokenizer.hasChatTemplate else {
                return try encode(messages.map(\.content).joined(separator: "\n"))
            }
            do {
                return try tokenizer.applyChatTemplate(
                    messages: messages.map { ["role": $0.role.rawValue, "content": $0.content] })
            } catch {
                throw SpeculativeError.cannotEncode(
                    reason: "the base's chat template refuses these messages: \(error.localizedDescription)")
            }
        }

        public func decode(_ tokens: [Int]) -> String {
            tokenizer.decode(tokens: tokens, skipSpecialTokens: true)
        }
    }
#endif
