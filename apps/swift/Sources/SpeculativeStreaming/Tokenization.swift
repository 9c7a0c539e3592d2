import Foundation

/// Turns text into tokens and back. Beginning-of-text tokens are the generator's business.
public protocol TextTokenizer: Sendable {
    /// Token ids of a text, no special tokens added. Throws `cannotEncode` where there is only a decoder.
    func encode(_ text: String) throws -> [Int]

    /// Text of token ids, special tokens left out; U+FFFD for a cut character.
    func decode(_ tokens: [Int]) -> String

    /// Token ids of a conversation up to where the assistant writes, by the base's chat template. Throws
    /// `cannotEncode` when the template refuses the messages.
    func encode(chat messages: [ChatMessage]) throws -> [Int]
}

extension TextTokenizer {
    /// Of a base without a chat template: the contents joined by line breaks, each one as it is, so that an
    /// application's prompt can be sent as one message.
    public func encode(chat messages: [ChatMessage]) throws -> [Int] {
        try encode(messages.map(\.content).joined(separator: "\n"))
    }
}

/// Text of tokens as they arrive, never half a character.
///
/// A token's text may depend on the one before it (leading spaces) and a character may span tokens, so a
/// window of the last settled tokens and the open ones is decoded, and only what is new is handed out.
struct Detokenizer {
    private let tokenizer: any TextTokenizer
    private var settled: [Int] = []
    private var open: [Int] = []

    init(_ tokenizer: any TextTokenizer) { self.tokenizer = tokenizer }

    /// The text that became certain with `token`; may be empty.
    mutating func add(_ token: Int) -> String.UnicodeScalarView {
        open.append(token)
        let text = newText()
        guard let last = text.last, last != "\u{FFFD}" else { return String.UnicodeScalarView() }
        (settled, open) = (open, [])
        return text
    }

    /// The text of what is still open; a cut character reads as U+FFFD.
    mutating func finish() -> String.UnicodeScalarView {
        let text = newText()
        open = []
        return text
    }

    private func newText() -> String.UnicodeScalarView {
        let before = tokenizer.decode(settled).unicodeScalars.count
        return String.UnicodeScalarView(tokenizer.decode(settled + open).unicodeScalars.dropFirst(before))
    }
}

/// Watches growing text for stop strings and holds back what may become one.
///
/// Works on Unicode scalars: a stop string may end inside what Swift counts as one character.
struct StopStrings {
    private let strings: [[Unicode.Scalar]]
    private var held: [Unicode.Scalar] = []

    init(_ strings: [String]) {
        self.strings = strings.filter { !$0.isEmpty }.map { Array($0.unicodeScalars) }
    }

    /// Text that may be shown, and whether a stop string was met (what follows it is dropped).
    mutating func add(_ text: String.UnicodeScalarView) -> (text: String, stopped: Bool) {
        held += text
        let found = strings.compactMap(firstPlace).min()
        let shown = found ?? held.count - openSuffix()
        let result = Self.string(held[..<shown])
        held = found == nil ? Array(held[shown...]) : []
        return (result, found != nil)
    }

    /// What was held back and turned out to be ordinary text.
    mutating func finish() -> String {
        defer { held = [] }
        return Self.string(held[...])
    }

    private func firstPlace(of string: [Unicode.Scalar]) -> Int? {
        guard held.count >= string.count else { return nil }
        return (0...(held.count - string.count)).first { held[$0..<$0 + string.count].elementsEqual(string) }
    }

    /// Length of the longest end of the held text that begins a stop string.
    private func openSuffix() -> Int {
        let longest = min((strings.map(\.count).max() ?? 1) - 1, held.count)
        return stride(from: longest, to: 0, by: -1).first { count in
            strings.contains { $0.starts(with: held.suffix(count)) }
        } ?? 0
    }

    private static func string(_ scalars: ArraySlice<Unicode.Scalar>) -> String {
        String(String.UnicodeScalarView(scalars))
    }
}

/// Text of a byte-level BPE vocabulary (`tokenizer.json`): enough to show what token ids say where no full
/// tokenizer is available, as on Linux. It cannot encode.
public struct ByteLevelDecoder: TextTokenizer {
    private let bytes: [Int: [UInt8]]

    /// Throws for a missing file, or one whose decoder is not byte-level.
    public init(tokenizerFile url: URL) throws {
        guard let data = try? Data(contentsOf: url) else { throw SpeculativeError.missingFile(path: url.path) }
        let file: TokenizerFile
        do {
            file = try JSONDecoder().decode(TokenizerFile.self, from: data)
        } catch let error as DecodingError {
            throw SpeculativeError.damagedFile(path: url.path, reason: oneLine(error))
        }
        guard file.decoder?.type == "ByteLevel" else {
            throw SpeculativeError.damagedFile(path: url.path, reason: "its decoder is not byte-level")
        }
        let special = Set(file.addedTokens.filter(\.special).map(\.id))
        let table = Self.byteOfScalar
        bytes = file.model.vocab.reduce(into: [:]) { result, entry in
            guard !special.contains(entry.value) else { return }
            result[entry.value] = entry.key.unicodeScalars.compactMap { table[$0] }
        }
    }

    public func encode(_ text: String) throws -> [Int] {
        throw SpeculativeError.cannotEncode(reason: "only a decoder is available, pass token ids")
    }

    public func decode(_ tokens: [Int]) -> String {
        String(decoding: tokens.flatMap { bytes[$0] ?? [] }, as: UTF8.self)
    }

    /// GPT-2's table: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up.
    private static let byteOfScalar: [Unicode.Scalar: UInt8] = {
        let printable = Array(33...126) + Array(161...172) + Array(174...255)
        var table: [Unicode.Scalar: UInt8] = [:]
        var next: UInt32 = 256
        for byte in 0...255 {
            let isPrintable = printable.contains(byte)
            guard let scalar = Unicode.Scalar(isPrintable ? UInt32(byte) : next) else { continue }
            table[scalar] = UInt8(byte)
            if !isPrintable { next += 1 }
        }
        return table
    }()

    private struct TokenizerFile: Decodable {
        struct AddedToken: Decodable {
            let id: Int
            let special: Bool
        }
        struct Decoder: Decodable { let type: String }
        struct Model: Decodable { let vocab: [String: Int] }

        let addedTokens: [AddedToken]
        let decoder: Decoder?
        let model: Model

        enum CodingKeys: String, CodingKey {
            case decoder, model
            case addedTokens = "added_tokens"
        }
    }
}
