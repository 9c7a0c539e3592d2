import Foundation

/// Everything a caller can act on, with one readable line each (`errorDescription`).
///
/// A command prints the line and exits with code 2; an app shows it as it is.
public enum SpeculativeError: Error, Equatable, Sendable {
    case missingFile(path: String)
    case notABundle(path: String)
    case damagedFile(path: String, reason: String)
    case wrongSize(file: String, found: Int, expected: Int)
    case checksumMismatch(file: String)
    case unsupportedFormat(path: String, found: Int, supported: Int)
    case adapterNotNamed(known: [String])
    case unknownAdapter(name: String, known: [String])
    case noCoreMLPackage(adapter: String)
    case noCoreAIAsset(adapter: String)
    case missingTemplateField(name: String, expected: [String])
    case cannotEncode(reason: String)
    case emptyPrompt
    case promptTooLong(tokens: Int, context: Int)
    case tooManyNodes(requested: Int, limit: Int)
    case contextFull(context: Int)
    case invalidSetting(String)
    case noLogits
    case walkMismatch(model: Int, host: Int)
    case backEnd(String)
    case cancelled
    case superseded
}

extension SpeculativeError: LocalizedError, CustomStringConvertible {
    public var errorDescription: String? { description }

    public var description: String {
        switch self {
        case .missingFile(let path):
            return "\(path): no such file"
        case .notABundle(let path):
            return "\(path): not a bundle (no manifest.json); make one with ss-convert"
        case .damagedFile(let path, let reason):
            return "\(path): damaged (\(reason))"
        case .wrongSize(let file, let found, let expected):
            return "file '\(file)' of the bundle has \(found) bytes, expected \(expected)"
        case .checksumMismatch(let file):
            return "file '\(file)' of the bundle was changed after the conversion (sha256 differs)"
        case .unsupportedFormat(let path, let found, let supported):
            let advice = found > supported ? "; update SpeculativeStreaming" : "; convert it again"
            return "\(path): bundle format version \(found), this library reads \(supported)\(advice)"
        case .adapterNotNamed(let known):
            return "name one of the bundle's adapters: \(known.joined(separator: ", "))"
        case .unknownAdapter(let name, let known):
            let found = known.isEmpty ? "none" : known.joined(separator: ", ")
            return "no adapter '\(name)' in this bundle (found: \(found))"
        case .noCoreMLPackage(let adapter):
            return "adapter '\(adapter)' has no Core ML package in this bundle (ss-convert --target coreml)"
        case .noCoreAIAsset(let adapter):
            return "adapter '\(adapter)' has no Core AI asset in this bundle (ss-convert --target coreai)"
        default:
            return requestDescription
        }
    }

    /// Lines of the errors that concern a request rather than a file.
    private var requestDescription: String {
        switch self {
        case .missingTemplateField(let name, let expected):
            return "the prompt template needs the field '\(name)' (its fields: \(expected.joined(separator: ", ")))"
        case .cannotEncode(let reason):
            return "text cannot be turned into tokens here: \(reason)"
        case .emptyPrompt:
            return "the prompt is empty: at least one token is needed"
        case .promptTooLong(let tokens, let context):
            return "the prompt has \(tokens) tokens, the context holds \(context)"
        case .tooManyNodes(let requested, let limit):
            return "\(requested) nodes asked for, this model takes at most \(limit)"
        case .contextFull(let context):
            return "the context of \(context) tokens is full"
        case .invalidSetting(let text), .backEnd(let text):
            return text
        case .noLogits:
            return "this package returns no logits, so tokens cannot be sampled; use greedy decoding, or "
                + "convert the adapter with sampling"
        case .walkMismatch(let model, let host):
            return "the model accepted node \(model), the host's walk ended at node \(host)"
        case .cancelled:
            return "the generation was cancelled"
        case .superseded:
            return "another generation was started on the same model; this one cannot go on"
        default:
            return "unexpected error"
        }
    }
}

/// An error's message on one line.
package func oneLine(_ error: any Error) -> String {
    if let known = error as? SpeculativeError { return known.description }
    return error.localizedDescription.split(whereSeparator: \.isWhitespace).joined(separator: " ")
}
